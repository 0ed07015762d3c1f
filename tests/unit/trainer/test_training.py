"""The training loop against a cluster in memory: exact resumes, and books that add up."""

import asyncio
import shutil
import threading
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from ebbtide.driver.service import drive
from ebbtide.driver.settings import DriverSettings
from ebbtide.errors import InvalidRequest, PermissionDenied
from ebbtide.trainer import training_checkpoint
from ebbtide.trainer.learning import network
from ebbtide.trainer.learning.local_learning import LocalLearning
from ebbtide.trainer.service import train
from ebbtide.trainer.training_checkpoint import CheckpointError, latest
from ebbtide.types.run import RunEvent, RunSpec, RunStatus
from tests.support.waiting import wait_until
from tests.unit.trainer.trained_runs import (
    SETTINGS,
    deeds,
    feed,
    feed_sessions,
    final_weights,
    make_spec,
    make_trajectories,
    reached,
    train_to_end,
)


async def test_a_run_publishes_reports_and_commits_every_step(
    tiny_model: Path, tmp_path: Path, make_cluster: Any, make_client: Any
) -> None:
    cluster = make_cluster(make_spec(tiny_model, tmp_path), lambda request: None)
    await train_to_end(cluster, make_client(cluster))
    assert [(version.version, version.step) for version in cluster.versions] == [(n + 1, n) for n in range(5)]
    steps = cluster.named("step")
    assert [event.values["step"] for event in steps] == [1, 2, 3, 4]
    for event in steps:
        assert event.values["trained"] == 6
        assert 0 < event.values["grad_norm"] < float("inf")
        assert event.values["staleness_max"] == 0
        assert event.values["accuracy"] == 0.5
        assert event.values["seconds_train"] > 0
        assert {"reward", "reward_std", "response_length", "entropy"} <= set(event.values)
        assert {"clip_share", "logprob_gap", "loss"} <= set(event.values)
        published = {name: value for name, value in event.values.items() if name.startswith("publish_")}
        assert published == {
            "publish_bytes": 100.0,
            "publish_dense_bytes": 1000.0,
            "publish_density": 0.03,
            "publish_pause_s": 0.001,
            "publish_seconds": pytest.approx(0.006),
            "publish_patch": 1.0,
        }
    rates = [event.values["learning_rate"] for event in steps]
    assert rates == sorted(rates)
    assert rates[0] < 1e-2
    assert cluster.counters["trained"] == 24
    assert any(not torch.equal(tensor, cluster.weights[1][name]) for name, tensor in final_weights(cluster).items())


async def test_a_run_of_agents_trains_on_sessions_as_they_come_and_is_ended_by_its_driver(
    tiny_model: Path, tmp_path: Path, make_cluster: Any, make_client: Any
) -> None:
    spec = make_spec(tiny_model, tmp_path, environment={"name": "agents"}, batch={"max_staleness": 2})
    cluster = make_cluster(spec, lambda request: None)
    client = make_client(cluster)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(feed_sessions(cluster))
        tasks.create_task(train(client, cluster.lease("trainer"), SETTINGS))
        tasks.create_task(drive(client, cluster.lease("driver"), DriverSettings(output_roots=("/",))))
    assert cluster.run.status is RunStatus.FINISHED
    steps = cluster.named("step")
    assert [event.values["step"] for event in steps] == [1, 2, 3, 4]
    per_step = spec.batch.groups_per_step * spec.batch.group_size * 2
    assert [event.values["trained"] for event in steps] == [per_step] * 4
    assert cluster.settled()
    assert cluster.dropped["too_stale"] > 0
    assert not cluster.rollouts


async def test_the_final_checkpoint_loads_with_transformers_and_holds_the_published_weights(
    tiny_model: Path, tmp_path: Path, make_cluster: Any, make_client: Any
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    cluster = make_cluster(make_spec(tiny_model, tmp_path), lambda request: None)
    await train_to_end(cluster, make_client(cluster))
    path = latest(tmp_path / "run-1" / "checkpoints")
    assert path is not None
    assert str(path.resolve()) == cluster.named("checkpoint")[-1].labels["path"]
    loaded = AutoModelForCausalLM.from_pretrained(path).state_dict()
    assert AutoTokenizer.from_pretrained(path).eos_token_id == 2
    assert all(torch.equal(loaded[name], tensor) for name, tensor in final_weights(cluster).items())
    assert not [file for file in path.rglob("*") if file.suffix in {".bin", ".pt", ".pkl", ".pth"}]


async def test_a_trainer_that_starts_again_at_any_action_gives_bitwise_the_same_weights_and_trains_nothing_twice(
    tiny_model: Path, tmp_path: Path, make_cluster: Any, make_client: Any
) -> None:
    whole = make_cluster(make_spec(tiny_model, tmp_path / "whole"), lambda request: None)
    await train_to_end(whole, make_client(whole))
    for stop_after in range(1, deeds(whole) + 1):
        spec = make_spec(tiny_model, tmp_path / str(stop_after))
        cluster = make_cluster(spec, lambda request: None)
        client = make_client(cluster)
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            tasks.create_task(feed(cluster))
            first = asyncio.create_task(train(client, cluster.lease("trainer"), SETTINGS))
            await wait_until(partial(reached, cluster, first, stop_after))
            first.cancel()
            await asyncio.wait({first})
            if not cluster.run.status.ended:
                await train(client, cluster.lease("trainer"), SETTINGS)
        expected, found = final_weights(whole), final_weights(cluster)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()), stop_after
        assert len(cluster.trained_episodes) == len(set(cluster.trained_episodes))
        assert set(cluster.trained_episodes) == set(whole.trained_episodes)
        assert [version.step for version in cluster.versions] == [0, 1, 2, 3, 4]
        last = {event.values["step"]: event.values["loss"] for event in cluster.named("step")}
        assert last == {event.values["step"]: event.values["loss"] for event in whole.named("step")}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("staleness", "announced"), [(0, [1, 2, 3]), (1, [1, 1, 2])])
async def test_a_step_is_trained_beside_its_versions_way_only_where_staleness_allows(
    staleness: int,
    announced: list[int],
    streaming: bool,
    tiny_model: Path,
    tmp_path: Path,
    make_cluster: Any,
    make_client: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Trajectories of all steps are there; each version stays on its way until the trainer waits for it."""
    trainer = {"steps": 3, "checkpoint_every": 100, "minibatches": 1, "streaming": streaming}
    spec = make_spec(tiny_model, tmp_path, batch={"max_staleness": staleness}, trainer=trainer)
    cluster, known = make_cluster(spec, lambda request: None), dict[int, int]()
    name = "add_groups" if streaming else "step"
    compute = getattr(LocalLearning, name)

    def spy(self: LocalLearning, *args: Any, step: int, **named: Any) -> Any:
        known.setdefault(step, len(cluster.versions))
        return compute(self, *args, step=step, **named)

    async def hold() -> None:
        """Let a version go on once the trainer has trained as far as it may without it."""
        for number, count in enumerate((1, 2, 3), start=1):
            await wait_until(lambda: len(known) >= count - 1 + (staleness and number > 1))  # noqa: B023
            await wait_until(lambda: f"trainer:publish {number - 1}" in cluster.log and cluster.on_their_way)  # noqa: B023
            cluster.relay.set()
            cluster.relay.clear()  # at once: only the one that waits goes on
            await wait_until(lambda: len(cluster.versions) >= number)  # noqa: B023
            if number == 1:
                for item in (one for at in range(3) for one in make_trajectories(spec, at, 1)):
                    made = msgspec.structs.replace(item, cursor=str(len(cluster.trajectories) + 1))
                    cluster.trajectories.append(made)
                cluster.bell()
        cluster.relay.set()

    monkeypatch.setattr(LocalLearning, name, spy)
    cluster.relay.clear()
    training = asyncio.create_task(train(make_client(cluster), cluster.lease("trainer"), SETTINGS))
    async with asyncio.timeout(30):
        await hold()
        await wait_until(lambda: cluster.named("checkpoint"), what="the end")
    cluster.finish(RunStatus.FINISHED, "")
    await training
    assert list(known.values()) == announced
    assert [version.step for version in cluster.versions] == [0, 1, 2, 3]
    assert [(event.values["step"], event.values["version"]) for event in cluster.named("step")] == [
        (1, 2),
        (2, 3),
        (3, 4),
    ]
    order = [deed for deed in cluster.log if "publish" in deed or "announce" in deed]
    assert order == [f"trainer:{deed} {at}" for at in range(4) for deed in ("publish", "announce")]


async def test_numbers_that_the_relay_remembers_of_a_forgotten_run_are_passed_over(
    tiny_model: Path, tmp_path: Path, make_cluster: Any, make_client: Any
) -> None:
    cluster = make_cluster(make_spec(tiny_model, tmp_path, trainer={"steps": 1}), lambda request: None)
    cluster.taken = 2
    await train_to_end(cluster, make_client(cluster))
    assert [(version.version, version.step) for version in cluster.versions] == [(3, 0), (4, 1)]


async def test_a_checkpoint_that_goes_while_it_is_read_gives_way_to_the_newer_one(
    tiny_model: Path, tmp_path: Path, make_cluster: Any, make_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster(make_spec(tiny_model, tmp_path), lambda request: None)
    client, prepare, looked = make_client(cluster), training_checkpoint.prepare, list[Path]()

    def overtaken(folder: Path) -> Path | None:
        found = prepare(folder)
        assert found is not None
        looked.append(found if looked else found.with_name("step-000000"))
        return looked[-1]

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(feed(cluster))
        first = asyncio.create_task(train(client, cluster.lease("trainer"), SETTINGS))
        await wait_until(lambda: cluster.named("checkpoint"), what="a checkpoint")
        first.cancel()
        await asyncio.wait({first})
        monkeypatch.setattr(training_checkpoint, "prepare", overtaken)
        await train(client, cluster.lease("trainer"), SETTINGS)
    assert [version.step for version in cluster.versions] == [0, 1, 2, 3, 4]
    assert len(looked) == 2


async def test_a_run_that_brings_its_own_trainer_is_neither_trained_nor_failed(
    tiny_model: Path, tmp_path: Path, make_cluster: Any, make_client: Any
) -> None:
    cluster = make_cluster(make_spec(tiny_model, tmp_path, trainer={"name": "external"}), lambda request: None)
    with pytest.raises(PermissionDenied, match="brings its own trainer"):
        await train(make_client(cluster), cluster.lease("trainer"), SETTINGS)
    assert not cluster.log


async def test_stale_and_late_trajectories_are_dropped_and_counted(
    tiny_model: Path, tmp_path: Path, make_cluster: Any, make_client: Any
) -> None:
    cluster = make_cluster(make_spec(tiny_model, tmp_path, trainer={"steps": 2}), lambda request: None)

    async def disturb() -> None:
        await wait_until(lambda: len(cluster.versions) == 2)
        for name, step, version in (("late", 0, 1), ("stale", 1, 1)):
            one = make_trajectories(cluster.run.spec, step, version)[0]
            cursor = str(len(cluster.trajectories) + 1)
            changes = {"episode_id": name, "group_id": name, "group_size": 1, "cursor": cursor}
            cluster.trajectories.append(msgspec.structs.replace(one, **changes))
            cluster.counters["submitted"] += 1
        cluster.emit(RunEvent(kind="disturbed"))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(disturb())
        await train_to_end(cluster, make_client(cluster))
    assert dict(cluster.dropped) == {"too_stale": 2}
    assert cluster.counters["trained"] == 12


async def test_the_control_permutes_rewards_inside_groups_and_learns_something_else(
    tiny_model: Path, tmp_path: Path, make_cluster: Any, make_client: Any
) -> None:
    weights: list[torch.Tensor] = []
    for permute in (False, True, True):
        spec = make_spec(tiny_model, tmp_path / f"{len(weights)}", trainer={"permute_rewards": permute})
        cluster = make_cluster(spec, lambda request: None)
        await train_to_end(cluster, make_client(cluster))
        weights.append(final_weights(cluster)["lm_head.weight"])
        assert cluster.named("step")[0].values["reward"] == pytest.approx(0.418, abs=0.2)
    assert not torch.equal(weights[0], weights[1])
    assert torch.equal(weights[1], weights[2])


async def test_a_checkpoint_of_an_earlier_run_of_the_same_name_is_refused(
    tiny_model: Path, tmp_path: Path, make_cluster: Any, make_client: Any
) -> None:
    spec = make_spec(tiny_model, tmp_path)
    await train_to_end(cluster := make_cluster(spec, lambda request: None), make_client(cluster))
    again = make_cluster(spec, lambda request: None)
    with pytest.raises(CheckpointError, match="an earlier run"):
        await train(make_client(again), again.lease("trainer"), SETTINGS)


async def test_a_starved_trainer_checkpoints_early_when_the_quota_is_what_keeps_rollouts_back(
    tiny_model: Path, tmp_path: Path, make_cluster: Any, make_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ebbtide.trainer.training._STARVED_S", 0.05)
    spec = make_spec(tiny_model, tmp_path, trainer={"steps": 2, "checkpoint_every": 100})
    cluster = make_cluster(spec, lambda request: None)
    cluster.run.counters["bytes"] = spec.quota_bytes

    async def feed_when_there_is_room() -> None:
        await wait_until(lambda: cluster.versions)
        for step in range(2):
            for trajectory in make_trajectories(spec, step, step + 1):
                cursor = str(len(cluster.trajectories) + 1)
                cluster.trajectories.append(msgspec.structs.replace(trajectory, cursor=cursor))
                cluster.counters["submitted"] += 1
            cluster.bell()
            await wait_until(cluster.settled, what=f"step {step} to be committed")
        cluster.finish(RunStatus.FINISHED, "")

    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        tasks.create_task(feed_when_there_is_room())
        tasks.create_task(train(make_client(cluster), cluster.lease("trainer"), SETTINGS))
    assert [event.values["step"] for event in cluster.named("checkpoint")] == [1, 2]


async def test_bfloat16_publishes_half_the_bytes_and_keeps_float32_masters(
    tiny_model: Path, tmp_path: Path, make_cluster: Any, make_client: Any
) -> None:
    from safetensors.torch import load_file

    spec = make_spec(tiny_model, tmp_path, trainer={"steps": 2, "dtype": "bfloat16"})
    cluster = make_cluster(spec, lambda request: None)
    await train_to_end(cluster, make_client(cluster))
    found = latest(tmp_path / "run-1" / "checkpoints")
    assert found is not None
    masters = load_file(found / "model.safetensors")
    for name, tensor in final_weights(cluster).items():
        assert (tensor.dtype, masters[name].dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(masters[name].to(torch.bfloat16), tensor)
        assert name.endswith("norm.weight") or not torch.equal(tensor, cluster.weights[1][name])


async def test_a_training_that_ends_finishes_the_checkpoint_that_it_writes(
    tiny_model: Path, tmp_path: Path, make_cluster: Any, make_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = threading.Event(), threading.Event()
    save = network.save_network

    def slow(*given: Any, **named: Any) -> None:
        begun.set()
        go.wait()
        save(*given, **named)

    monkeypatch.setattr(training_checkpoint, "save_network", slow)
    cluster = make_cluster(make_spec(tiny_model, tmp_path), lambda request: None)
    training = asyncio.create_task(train(make_client(cluster), cluster.lease("trainer"), SETTINGS))
    feeding = asyncio.create_task(feed(cluster))
    await wait_until(begun.is_set, timeout=30)
    training.cancel()
    await asyncio.sleep(0)
    go.set()
    feeding.cancel()
    await asyncio.wait({training, feeding})
    assert [path.name for path in (tmp_path / "run-1" / "checkpoints").iterdir()] == ["step-000002"]
    await wait_until(lambda: not any(thread.name == "checkpoint" for thread in threading.enumerate()), timeout=30)


async def test_a_run_loads_its_model_once_the_step_of_a_cancelled_one_is_over(
    tiny_model: Path, tmp_path: Path, make_cluster: Any, make_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go, told = threading.Event(), threading.Event(), list[str]()
    step, load, prepare = LocalLearning.step, LocalLearning._load, training_checkpoint.prepare

    def slow(*given: Any, **named: Any) -> Any:
        begun.set()
        go.wait()
        found = step(*given, **named)
        told.append("step is over")
        return found

    def noted(name: str, work: Any) -> Any:
        def note(*given: Any) -> Any:
            told.append(name)
            return work(*given)

        return note

    monkeypatch.setattr(LocalLearning, "step", slow)
    monkeypatch.setattr(LocalLearning, "_load", noted("loads", load))
    monkeypatch.setattr(training_checkpoint, "prepare", noted("prepares", prepare))
    cluster = make_cluster(make_spec(tiny_model, tmp_path), lambda request: None)
    trainings = [asyncio.create_task(train(make_client(cluster), cluster.lease("trainer"), SETTINGS))]
    feeding = asyncio.create_task(feed(cluster))
    await wait_until(begun.is_set, timeout=30)
    trainings[0].cancel()
    trainings.append(asyncio.create_task(train(make_client(cluster), cluster.lease("trainer"), SETTINGS)))
    await wait_until(lambda: told.count("prepares") == 2, timeout=30)
    go.set()
    await wait_until(lambda: told.count("loads") == 2, timeout=30)
    feeding.cancel()
    trainings[1].cancel()
    await asyncio.wait([*trainings, feeding])
    assert told[:5] == ["prepares", "loads", "prepares", "step is over", "loads"]


async def test_a_run_whose_checkpoint_is_gone_fails_and_does_not_wait_for_what_was_deleted(
    tiny_model: Path, tmp_path: Path, make_cluster: Any, make_client: Any
) -> None:
    cluster = make_cluster(make_spec(tiny_model, tmp_path), lambda request: None)
    first = asyncio.create_task(train(make_client(cluster), cluster.lease("trainer"), SETTINGS))
    feeding = asyncio.create_task(feed(cluster))
    await wait_until(lambda: cluster.committed, timeout=30)
    first.cancel()
    feeding.cancel()
    await asyncio.wait({first, feeding})
    shutil.rmtree(tmp_path / "run-1")
    with pytest.raises(CheckpointError, match="checkpoint of step 2 is not there any more"):
        await train(make_client(cluster), cluster.lease("trainer"), SETTINGS)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"sampling": {"temperature": 0.0}}, "sampling.temperature"),
        ({"sampling": {"repetition_penalty": 1.1}}, "sampling.repetition_penalty"),
        ({"trainer": {"name": "no_such_module:function"}}, "trainer.name"),
        ({"model": "no-such-directory"}, "model"),
    ],
)
async def test_what_cannot_be_trained_is_refused_by_field(
    changes: dict[str, Any], field: str, tiny_model: Path, tmp_path: Path, make_cluster: Any, make_client: Any
) -> None:
    changes = {"sampling": {}, **changes}
    spec = msgspec.convert(
        {**msgspec.to_builtins(make_spec(tiny_model, tmp_path)), **{k: v for k, v in changes.items() if v}}, RunSpec
    )
    cluster = make_cluster(spec, lambda request: None)
    with pytest.raises(InvalidRequest) as caught:
        await train(make_client(cluster), cluster.lease("trainer"), SETTINGS)
    assert caught.value.field == field


async def test_a_run_may_name_a_trainer_of_its_own(
    tiny_model: Path, tmp_path: Path, make_cluster: Any, make_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys
    import types

    called = []

    async def mine(client: Any, lease: Any, run: Any) -> None:
        called.append(run.run_id)
        lease.lost.set()

    module = types.ModuleType("trainer_for_tests")
    module.mine = mine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trainer_for_tests", module)
    spec = make_spec(tiny_model, tmp_path, trainer={"name": "trainer_for_tests:mine"})
    cluster = make_cluster(spec, lambda request: None)
    async with asyncio.timeout(5):
        await train(make_client(cluster), cluster.lease("trainer"), SETTINGS)
    assert called == ["run-1"]
