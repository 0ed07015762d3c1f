"""The training loop against a cluster in memory: exact resumes, and books that add up."""

import asyncio
import random
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from ebbtide.driver.service import drive
from ebbtide.driver.settings import DriverSettings
from ebbtide.errors import InvalidRequest, PermissionDenied
from ebbtide.testing import wait_until
from ebbtide.trainer import training_checkpoint
from ebbtide.trainer.learning.local_learning import LocalLearning
from ebbtide.trainer.service import train
from ebbtide.trainer.settings import TrainerSettings
from ebbtide.trainer.training_checkpoint import CheckpointError, latest
from ebbtide.types.rollout import Trajectory
from ebbtide.types.run import RunEvent, RunSpec, RunStatus
from ebbtide.types.tokens import pack_ids, pack_tokens

SETTINGS = TrainerSettings(device="cpu", threads=1, output_roots=("/",), allowed_trainers=("*",))
DEEDS = ("trainer:publish", "trainer:announce", "trainer:report", "trainer:commit")


def make_spec(model: Path, output: Path, **changes: Any) -> RunSpec:
    base: dict[str, Any] = {
        "name": "run",
        "model": str(model),
        "output": str(output),
        "environment": {"name": "reasoning_gym"},
        "batch": {"groups_per_step": 2, "group_size": 3},
        "trainer": {"steps": 4, "learning_rate": 1e-2, "checkpoint_every": 2, "minibatches": 2, "warmup_steps": 3},
    }
    for name, value in changes.items():
        base[name] = {**base[name], **value} if isinstance(value, dict) else value
    return msgspec.convert(base, RunSpec)


def make_trajectories(spec: RunSpec, step: int, version: int) -> list[Trajectory]:
    """The same for the same step; they arrive in another order for every version."""
    rng, made = random.Random(step), []
    for group in range(spec.batch.groups_per_step):
        for sample in range(spec.batch.group_size):
            ids = [rng.randrange(5, 90) for _ in range(rng.randrange(3, 9))]
            made.append(
                Trajectory(
                    episode_id=f"s{step}.g{group}.{sample}",
                    group_id=f"s{step}.g{group}",
                    step=step,
                    group_size=spec.batch.group_size,
                    prompt_ids=pack_ids([3, 10 + group, 4]),
                    tokens=pack_tokens(ids, [-4.5] * len(ids), version),
                    loss_mask=b"\x01" * len(ids),
                    reward=rng.random(),
                    metrics={"right": 1.0, "asked": 2.0},
                )
            )
    random.Random(version).shuffle(made)
    return made


async def feed(cluster: Any) -> None:
    """Stands for driver and workers: trajectories for each announced version, and the run's end once all is told."""
    spec: RunSpec = cluster.run.spec
    for step in range(spec.trainer.steps):
        await wait_until(lambda: max((version.step for version in cluster.versions), default=-1) >= step)  # noqa: B023
        version = next(version.version for version in cluster.versions if version.step == step)
        made = make_trajectories(spec, step, version)
        for trajectory in made:
            cursor = str(len(cluster.trajectories) + 1)
            cluster.trajectories.append(msgspec.structs.replace(trajectory, cursor=cursor))
        cluster.counters["submitted"] += len(made)
        cluster.bell()
    await wait_until(lambda: cluster.settled() and cluster.versions[-1].step == spec.trainer.steps, timeout=30)
    cluster.finish(RunStatus.FINISHED, "")


async def feed_sessions(cluster: Any) -> None:
    """Stands for agents: sessions of two branches, one more in each group than it has, as soon as there are weights."""
    spec: RunSpec = cluster.run.spec
    await wait_until(lambda: bool(cluster.versions))
    for step in range(spec.trainer.steps + 1):
        wanted = min(step, spec.trainer.steps - 1)
        await wait_until(lambda: max(version.step for version in cluster.versions) >= wanted)  # noqa: B023
        made = make_trajectories(spec, step, max(version.version for version in cluster.versions))
        extra = msgspec.structs.replace(made[0], episode_id=f"s{step}.extra")
        for one in (*made, extra):
            for branch in range(2):
                name, cursor = f"{one.episode_id}.{branch}", str(len(cluster.trajectories) + 1)
                changes = {"episode_id": name, "cursor": cursor, "session_id": one.episode_id, "branches": 2}
                cluster.trajectories.append(msgspec.structs.replace(one, **changes))
                cluster.counters["submitted"] += 1
        cluster.bell()


async def train_to_end(cluster: Any, client: Any) -> None:
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(feed(cluster))
        tasks.create_task(train(client, cluster.lease("trainer"), SETTINGS))


def streamed(**trainer: Any) -> dict[str, Any]:
    return {"trainer": {"minibatches": 1, "streaming": True, **trainer}, "batch": {"groups_per_step": 4}}


class SlowRollouts:
    """Stands for driver and workers whose groups end one after another.

    Each group ends once the trainer has added those before to its gradient. `stop` is called in the middle of step
    `stop_in`: half of its groups are added, and no other group is there.
    """

    def __init__(self, cluster: Any, patch: pytest.MonkeyPatch, stop_in: int = -1) -> None:
        self._cluster, self._stop_in, self.stop = cluster, stop_in, asyncio.Event()
        self.added: list[tuple[int, set[str]]] = []  # step, groups
        self.going_on = asyncio.Event()
        add = LocalLearning.add_groups

        def spy(learning: LocalLearning, trajectories: list[Trajectory], *, step: int, version: int) -> None:
            add(learning, trajectories, step=step, version=version)
            self.added.append((step, {one.group_id for one in trajectories}))

        patch.setattr(LocalLearning, "add_groups", spy)

    async def feed(self) -> None:
        cluster = self._cluster
        spec: RunSpec = cluster.run.spec
        for step in range(spec.trainer.steps):
            await wait_until(lambda: max((version.step for version in cluster.versions), default=-1) >= step)  # noqa: B023
            version = next(version.version for version in cluster.versions if version.step == step)
            made = make_trajectories(spec, step, version)
            for number, name in enumerate(sorted({one.group_id for one in made})):
                if step == self._stop_in and number == 2:
                    self.stop.set()
                    await self.going_on.wait()
                for one in made:
                    if one.group_id == name:
                        cursor = str(len(cluster.trajectories) + 1)
                        cluster.trajectories.append(msgspec.structs.replace(one, cursor=cursor))
                        cluster.counters["submitted"] += 1
                cluster.bell()
                await wait_until(lambda: any(name in groups for _, groups in self.added))  # noqa: B023
        await wait_until(lambda: cluster.settled() and cluster.versions[-1].step == spec.trainer.steps, timeout=30)
        cluster.finish(RunStatus.FINISHED, "")


def apart(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Of the weight that differs most: the relative L2 distance."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - one).norm() / one.norm()) for name, one in theirs.items())


def final_weights(cluster: Any) -> dict[str, torch.Tensor]:
    last = next(version for version in cluster.versions if version.step == cluster.run.spec.trainer.steps)
    weights: dict[str, torch.Tensor] = cluster.weights[last.version]
    return weights


def deeds(cluster: Any) -> int:
    return sum(deed.startswith(DEEDS) for deed in cluster.log)


def reached(cluster: Any, trainer: "asyncio.Task[None]", count: int) -> bool:
    return trainer.done() or deeds(cluster) >= count


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


async def test_a_streamed_run_trains_on_groups_while_others_are_awaited_and_ends_as_one_that_waits_for_all(
    tiny_model: Path, tmp_path: Path, make_cluster: Any, make_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = make_cluster(make_spec(tiny_model, tmp_path / "a", **streamed(streaming=False)), lambda request: None)
    await train_to_end(waiting, make_client(waiting))
    cluster = make_cluster(make_spec(tiny_model, tmp_path / "b", **streamed()), lambda request: None)
    rollouts = SlowRollouts(cluster, monkeypatch)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(rollouts.feed())
        tasks.create_task(train(make_client(cluster), cluster.lease("trainer"), SETTINGS))
    assert [groups for _, groups in rollouts.added] == [
        {f"s{step}.g{group}"} for step in range(4) for group in range(4)
    ]
    assert apart(final_weights(cluster), final_weights(waiting)) < 1e-3
    assert cluster.trained_episodes == waiting.trained_episodes
    for ours, theirs in zip(cluster.named("step"), waiting.named("step"), strict=True):
        assert 0 < ours.values["overlapped_s"] < ours.values["seconds_train"]
        assert "overlapped_s" not in theirs.values
        for name in ("trained", "taught", "tokens", "reward", "staleness_max", "learning_rate"):
            assert ours.values[name] == theirs.values[name]
        for name in ("loss", "grad_norm", "entropy", "logprob_gap", "importance_weight"):
            assert ours.values[name] == pytest.approx(theirs.values[name], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("stop_in", [1, 3])
async def test_a_trainer_that_ends_within_a_streamed_step_keeps_nothing_of_it_and_the_next_trains_its_groups_once(
    stop_in: int,
    tiny_model: Path,
    tmp_path: Path,
    make_cluster: Any,
    make_client: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the first checkpoint, and after it with a step to repeat."""
    whole = make_cluster(make_spec(tiny_model, tmp_path / "a", **streamed(streaming=False)), lambda request: None)
    await train_to_end(whole, make_client(whole))
    cluster = make_cluster(make_spec(tiny_model, tmp_path / "b", **streamed()), lambda request: None)
    client, rollouts = make_client(cluster), SlowRollouts(cluster, monkeypatch, stop_in)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(rollouts.feed())
        first = asyncio.create_task(train(client, cluster.lease("trainer"), SETTINGS))
        await rollouts.stop.wait()
        begun = [groups for step, groups in rollouts.added if step == stop_in]
        assert len(begun) == 2
        first.cancel()
        await asyncio.wait({first})
        assert not any(name.startswith(f"s{stop_in}.") for name in cluster.trained_episodes)
        rollouts.going_on.set()
        await train(client, cluster.lease("trainer"), SETTINGS)
    assert apart(final_weights(cluster), final_weights(whole)) < 1e-3
    assert len(cluster.trained_episodes) == len(set(cluster.trained_episodes))
    assert sorted(cluster.trained_episodes) == sorted(whole.trained_episodes)


async def test_a_streamed_step_ends_without_dropped_groups_and_without_an_update_if_nothing_teaches(
    tiny_model: Path, tmp_path: Path, make_cluster: Any, make_client: Any
) -> None:
    cluster = make_cluster(make_spec(tiny_model, tmp_path, **streamed(steps=3)), lambda request: None)

    async def feed_unevenly() -> None:
        for step in range(3):
            await wait_until(lambda: max((version.step for version in cluster.versions), default=-1) >= step)  # noqa: B023
            kept = {0: 3, 1: 4, 2: 0}[step]  # groups
            for one in make_trajectories(cluster.run.spec, step, cluster.versions[-1].version):
                if int(one.group_id[-1]) < kept:
                    reward = 0.5 if step == 1 else one.reward
                    cursor = str(len(cluster.trajectories) + 1)
                    cluster.trajectories.append(msgspec.structs.replace(one, cursor=cursor, reward=reward))
                    cluster.counters["submitted"] += 1
            for group in range(kept, 4):
                cluster.emit(RunEvent(kind="group_dropped", key=f"s{step}.g{group}", values={"step": float(step)}))
            cluster.bell()
        await wait_until(lambda: cluster.settled() and len(cluster.named("step")) == 3, timeout=30)
        cluster.finish(RunStatus.FINISHED, "")

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(feed_unevenly())
        tasks.create_task(train(make_client(cluster), cluster.lease("trainer"), SETTINGS))
    told = [event.values for event in cluster.named("step")]
    assert [values["trained"] for values in told] == [9, 12, 0]
    assert ["loss" in values for values in told] == [True, False, False]
    assert torch.equal(cluster.weights[2]["lm_head.weight"], cluster.weights[4]["lm_head.weight"])


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


async def test_a_trainer_that_starts_again_at_any_deed_gives_bitwise_the_same_weights_and_trains_nothing_twice(
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


async def test_a_run_whose_checkpoint_is_gone_fails_and_does_not_wait_for_what_was_deleted(
    tiny_model: Path, tmp_path: Path, make_cluster: Any, make_client: Any
) -> None:
    import shutil

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
