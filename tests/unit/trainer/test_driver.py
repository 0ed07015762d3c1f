"""The episode driver against a cluster in memory: every rollout it submits comes to exactly one end."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ebbtide.driver.service import drive
from ebbtide.driver.settings import DriverSettings, EnvironmentSettings
from ebbtide.environments import BUILT_IN, Message, Split, StepResult
from ebbtide.errors import InvalidRequest
from ebbtide.run_client import RunFailed, load_conversations
from ebbtide.types.rollout import RolloutRequest, TrajectoryOutcome
from ebbtide.types.run import RunSpec, RunStatus
from ebbtide.types.tokens import unpack_ids, unpack_tokens
from tests.support.waiting import wait_until

END = 2
A, B = 50, 51
HERE = "environment_for_tests"
SETTINGS = DriverSettings(environments=EnvironmentSettings(allowed=("*",)))


class Behaviour:
    """What the environments of a test do; looked up by the factory that the run names."""

    turns = 1
    poison = ""  # a response that makes a training environment crash
    crash: Callable[[int], bool] = staticmethod(lambda index: False)
    hang: Callable[[int], bool] = staticmethod(lambda index: False)
    resets: list[int]
    released: threading.Event


class Source:
    identity = "for tests"

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour

    def make(self, split: Split, index: int) -> "Instance":
        return Instance(self.behaviour, split, index)


class Instance:
    def __init__(self, behaviour: Behaviour, split: Split, index: int) -> None:
        self.behaviour, self.split, self.index, self.turn = behaviour, split, index, 0

    def reset(self) -> list[Message]:
        self.behaviour.resets.append(self.index)
        return [Message("user", f"q{self.index}")]

    def step(self, response: str) -> StepResult:
        crash = self.behaviour.crash(len(self.behaviour.resets)) or response == self.behaviour.poison
        if self.split == "train" and crash:
            raise RuntimeError("boom")
        if self.split == "train" and self.behaviour.hang(len(self.behaviour.resets)):
            self.behaviour.released.wait(10)
        self.turn += 1
        if self.turn < self.behaviour.turns:
            return StepResult((Message("user", f"again {response}"),))
        right = float(len(response))
        return StepResult(reward=right, done=True, info={"right": right, "asked": 2.0})


@pytest.fixture
def behaviour(monkeypatch: pytest.MonkeyPatch) -> Behaviour:
    import sys
    import types

    behaviour = Behaviour()
    behaviour.resets, behaviour.released = [], threading.Event()
    module = types.ModuleType(HERE)

    def factory(params: Mapping[str, Any], seed: int) -> Source:
        return Source(behaviour)

    module.factory = factory  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, HERE, module)
    monkeypatch.setitem(BUILT_IN, HERE, f"{HERE}:factory")  # so that it runs in this process
    return behaviour


def make_spec(directory: Path, **changes: Any) -> RunSpec:
    base: dict[str, Any] = {
        "name": "run",
        "model": str(directory),
        "environment": {"name": HERE},
        "batch": {"groups_per_step": 2, "group_size": 3, "episode_timeout_s": 5.0},
        "trainer": {"steps": 2},
        "evaluation": {"problems": 4},
    }
    for name, value in changes.items():
        base[name] = {**base.get(name, {}), **value} if isinstance(value, dict) else value
    return msgspec.convert(base, RunSpec)


def echo(request: RolloutRequest) -> list[int]:
    return [A, B, END]


def has_all_groups(cluster: Any, step: int) -> bool:
    sizes = Counter((one.group_id, one.group_size) for one in cluster.trajectories if one.step == step)
    whole = sum(count == stated for (_, stated), count in sizes.items())
    lost = sum(int(event.values["step"]) == step for event in cluster.named("group_dropped"))
    return bool(whole == cluster.run.spec.batch.groups_per_step - lost)


async def consume(cluster: Any, *, until_step: int) -> None:
    """Stands for the trainer: waits for each step's groups, commits them and announces the next version."""
    cluster.announce(0)
    for step in range(until_step):
        await wait_until(partial(has_all_groups, cluster, step))
        lease = cluster.lease("trainer")
        await lease.commit([TrajectoryOutcome(cursor=one.cursor) for one in cluster.trajectories if one.step == step])
        cluster.announce(step + 1)


async def drive_to_end(cluster: Any, client: Any, **settings: Any) -> None:
    steps = cluster.run.spec.trainer.steps
    driver = drive(client, cluster.lease("driver"), msgspec.structs.replace(SETTINGS, **settings))
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        tasks.create_task(driver)
        tasks.create_task(consume(cluster, until_step=steps))


async def test_a_run_ends_with_every_rollout_counted_and_evaluations_reported(
    tiny_model: Path, behaviour: Behaviour, make_cluster: Any, make_client: Any
) -> None:
    cluster = make_cluster(make_spec(tiny_model), echo)
    await drive_to_end(cluster, make_client(cluster))
    assert cluster.run.status is RunStatus.FINISHED
    assert cluster.counters["submitted"] == cluster.counters["trained"] == 2 * 2 * 3
    assert not cluster.dropped
    evaluations = {event.key: event.values for event in cluster.named("evaluation")}
    assert set(evaluations) == {"0", "2"}
    assert evaluations["0"]["accuracy"] == 1.0
    assert (evaluations["0"]["version"], evaluations["2"]["version"]) == (1, 3)
    assert evaluations["2"]["problems"] == 4
    assert evaluations["2"]["answers"] == 8
    assert evaluations["2"]["mean_length"] == 3


async def test_with_staleness_zero_exactly_the_steps_version_may_answer(
    tiny_model: Path, behaviour: Behaviour, make_cluster: Any, make_client: Any
) -> None:
    cluster = make_cluster(make_spec(tiny_model, evaluation={"problems": 0}), echo)
    await drive_to_end(cluster, make_client(cluster))
    for request in cluster.rollouts.values():
        step = int(request.group_id[1])
        assert request.min_version == request.max_version == step + 1


async def test_a_step_is_over_once_its_groups_are_and_no_later_driver_begins_there(
    tiny_model: Path, behaviour: Behaviour, make_cluster: Any, make_client: Any
) -> None:
    cluster = make_cluster(make_spec(tiny_model, trainer={"steps": 4}), echo)
    await drive_to_end(cluster, make_client(cluster))
    of_training = [one for one in cluster.steps if one[0] is not None]
    assert {step for step, _ in of_training} == {0, 1, 2, 3}
    # A step begins while the one before is trained, or when that is over already.
    assert all(max(0, step - 1) <= first <= step for step, first in of_training if step is not None)
    assert [first for _, first in of_training] == sorted(first for _, first in of_training)
    assert len(of_training) < len(cluster.steps)  # evaluations have no step


async def test_turns_are_chained_and_what_the_environment_wrote_is_masked(
    tiny_model: Path, behaviour: Behaviour, make_cluster: Any, make_client: Any
) -> None:
    behaviour.turns = 3
    cluster = make_cluster(make_spec(tiny_model, evaluation={"problems": 0}), echo)
    await drive_to_end(cluster, make_client(cluster))
    assert cluster.counters["submitted"] == cluster.counters["trained"] == 2 * 2 * 3 * 3
    one = cluster.trajectories[0]
    tokens = unpack_tokens(one.tokens)
    mask = [bool(byte) for byte in one.loss_mask]
    assert one.rollouts == 3
    assert tokens["id"][mask].tolist() == [A, B, END] * 3
    assert not tokens["logprob"][[not bit for bit in mask]].any()
    assert not tokens["version"][[not bit for bit in mask]].any()
    last = cluster.rollouts[f"{one.episode_id}.t2"]
    together = unpack_ids(one.prompt_ids).tolist() + tokens["id"].tolist()
    assert unpack_ids(last.prompt_ids).tolist() == together[: -len([A, B, END])]


@pytest.mark.parametrize("setting", ["replace", "shrink", "drop"])
async def test_a_crash_fails_its_own_episode_with_a_reason_and_never_as_a_reward(
    setting: str, tiny_model: Path, behaviour: Behaviour, make_cluster: Any, make_client: Any
) -> None:
    failed: list[int] = []
    behaviour.crash = lambda resets: not failed and not failed.append(1)  # type: ignore[func-returns-value]
    spec = make_spec(tiny_model, batch={"incomplete_group": setting}, evaluation={"problems": 0})
    cluster = make_cluster(spec, echo)
    await drive_to_end(cluster, make_client(cluster), environment_threads=1)
    assert cluster.run.status is RunStatus.FINISHED
    assert cluster.settled()
    assert cluster.dropped["environment_failure"] == 1
    assert all(one.reward == 2.0 for one in cluster.trajectories)
    sizes = sorted(one.group_size for one in cluster.trajectories if one.step == 0)
    expected = {"replace": ([3] * 6, 0), "shrink": ([2, 2, 3, 3, 3], 0), "drop": ([3, 3, 3], 2)}
    assert (sizes, cluster.dropped["group_incomplete"]) == expected[setting]
    (warning,) = cluster.named("warning")
    assert "RuntimeError: boom" in warning.message


async def test_a_hanging_environment_times_out_alone(
    tiny_model: Path, behaviour: Behaviour, make_cluster: Any, make_client: Any
) -> None:
    hung: list[int] = []
    behaviour.hang = lambda resets: not hung and not hung.append(1)  # type: ignore[func-returns-value]
    spec = make_spec(tiny_model, batch={"episode_timeout_s": 0.3}, evaluation={"problems": 0})
    cluster = make_cluster(spec, echo)
    await drive_to_end(cluster, make_client(cluster), environment_threads=2)
    behaviour.released.set()
    assert cluster.run.status is RunStatus.FINISHED
    assert dict(cluster.dropped) == {"episode_timeout": 1}
    assert cluster.counters["trained"] == 12


async def test_an_environment_that_always_fails_fails_the_run_with_its_message(
    tiny_model: Path, behaviour: Behaviour, make_cluster: Any, make_client: Any
) -> None:
    behaviour.crash = lambda resets: True
    cluster = make_cluster(make_spec(tiny_model, evaluation={"problems": 0}), echo)
    cluster.announce(0)
    with pytest.raises(RunFailed, match=r"every episode of step 0 failed.*RuntimeError: boom"):
        await drive(make_client(cluster), cluster.lease("driver"), SETTINGS)
    assert cluster.dropped["environment_failure"] == 2 * 3 * 3


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"environment": {"name": "no_such"}}, "environment.name"),
        ({"environment": {"name": "reasoning_gym", "params": {"dataset": "no_such"}}}, "environment.params.dataset"),
        ({"model": "no-such-directory"}, "model"),
        ({"tail": {"reward_timeout_s": 1.0}}, "tail.reward_timeout_s"),  # built-in sources are scored in threads
    ],
)
async def test_bad_specs_are_refused_by_field_before_anything_is_submitted(
    changes: dict[str, Any], field: str, tiny_model: Path, behaviour: Behaviour, make_cluster: Any, make_client: Any
) -> None:
    cluster = make_cluster(make_spec(tiny_model, **changes), echo)
    with pytest.raises(InvalidRequest) as caught:
        await drive(make_client(cluster), cluster.lease("driver"), SETTINGS)
    assert caught.value.field == field
    assert not cluster.rollouts


async def test_a_tokenizer_that_does_not_arrive_in_time_fails_the_run(
    tiny_model: Path, behaviour: Behaviour, monkeypatch: pytest.MonkeyPatch, make_cluster: Any, make_client: Any
) -> None:
    over = threading.Event()
    monkeypatch.setattr("ebbtide.driver.service.LOADING_S", 0.05)
    monkeypatch.setattr("ebbtide.driver.service.load_conversations", lambda *_, **more: over.wait(30))
    cluster = make_cluster(make_spec(tiny_model), echo)
    try:
        with pytest.raises(RunFailed, match=r"tokenizer of .* was not there"):
            await drive(make_client(cluster), cluster.lease("driver"), SETTINGS)
    finally:
        over.set()
    assert not cluster.rollouts


async def test_a_driver_without_processes_for_scorings_refuses_their_limits(
    tiny_model: Path, behaviour: Behaviour, monkeypatch: pytest.MonkeyPatch, make_cluster: Any, make_client: Any
) -> None:
    monkeypatch.delitem(BUILT_IN, HERE)
    cluster = make_cluster(make_spec(tiny_model, tail={"reward_timeout_s": 1.0}), echo)
    settings = msgspec.structs.replace(
        SETTINGS, scoring_processes=0, environments=EnvironmentSettings(allowed=(HERE,), trust=True)
    )
    with pytest.raises(InvalidRequest, match="scoring_processes") as caught:
        await drive(make_client(cluster), cluster.lease("driver"), settings)
    assert caught.value.field == "tail.reward_timeout_s"
    assert not cluster.rollouts


def deeds(cluster: Any) -> int:
    return sum(deed in {"driver:submit", "driver:complete", "driver:report"} for deed in cluster.log)


def reached(cluster: Any, driver: "asyncio.Task[None]", count: int) -> bool:
    return driver.done() or deeds(cluster) >= count


@pytest.mark.parametrize("turns", [1, 2])
async def test_a_driver_that_starts_again_at_any_action_submits_the_same_and_loses_nothing(
    turns: int, tiny_model: Path, behaviour: Behaviour, make_cluster: Any, make_client: Any
) -> None:
    behaviour.turns = turns
    whole = make_cluster(make_spec(tiny_model), echo)
    await drive_to_end(whole, make_client(whole))
    for stop_after in range(1, deeds(whole) + 1):
        cluster = make_cluster(make_spec(tiny_model), echo)
        client = make_client(cluster)
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            tasks.create_task(consume(cluster, until_step=2))
            first = asyncio.create_task(drive(client, cluster.lease("driver"), SETTINGS))
            await wait_until(partial(reached, cluster, first, stop_after))
            first.cancel()
            await asyncio.wait({first})
            if not cluster.run.status.ended:
                await drive(client, cluster.lease("driver"), SETTINGS)
        assert cluster.run.status is RunStatus.FINISHED
        assert cluster.rollouts == whole.rollouts
        assert cluster.counters["trained"] == whole.counters["trained"]
        assert not cluster.dropped
        assert [event.values for event in cluster.named("evaluation")] == [
            event.values for event in whole.named("evaluation")
        ]


def poisoned(request: RolloutRequest) -> list[int]:
    """The first try at sample 1 of the first group always crashes its environment."""
    return [B, END] if request.rollout_id == "s0.g0.1.t0" else [A, B, END]


@pytest.mark.parametrize("setting", ["replace", "shrink"])
async def test_a_driver_killed_while_a_group_is_stored_leaves_one_that_becomes_whole(
    setting: str,
    tiny_model: Path,
    behaviour: Behaviour,
    make_cluster: Any,
    make_client: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = make_cluster(make_spec(tiny_model), poisoned)
    store = type(cluster.lease("driver")).complete_episodes

    async def one_by_one(lease: Any, episodes: Any) -> None:
        for episode in episodes:
            await store(lease, [episode])

    monkeypatch.setattr(type(cluster.leases[0]), "complete_episodes", one_by_one)
    behaviour.poison = load_conversations(str(tiny_model)).text([B])
    batch = {"incomplete_group": setting, "groups_per_step": 1}
    spec = make_spec(tiny_model, batch=batch, evaluation={"problems": 0}, trainer={"steps": 1})
    whole = make_cluster(spec, poisoned)
    await drive_to_end(whole, make_client(whole))
    assert whole.dropped == {"environment_failure": 1}
    for stop_after in range(1, deeds(whole)):
        cluster = make_cluster(spec, poisoned)
        cluster.announce(0)
        first = asyncio.create_task(drive(make_client(cluster), cluster.lease("driver"), SETTINGS))
        await wait_until(partial(reached, cluster, first, stop_after), interval=0)
        first.cancel()
        await asyncio.wait({first})
        await drive_to_end(cluster, make_client(cluster))
        assert cluster.run.status is RunStatus.FINISHED
        assert cluster.counters["trained"] == whole.counters["trained"]
        assert cluster.dropped.total() == 1  # a step that was trained meanwhile is not played again: then as cancelled


async def test_a_cancelled_run_ends_the_driver(
    tiny_model: Path, behaviour: Behaviour, make_cluster: Any, make_client: Any
) -> None:
    cluster = make_cluster(make_spec(tiny_model), lambda request: None)
    cluster.announce(0)
    driver = asyncio.create_task(drive(make_client(cluster), cluster.lease("driver"), SETTINGS))
    await wait_until(lambda: len(cluster.rollouts) == 10)
    cluster.finish(RunStatus.CANCELLED, "cancelled")
    async with asyncio.timeout(5):
        await driver


def graded(monkeypatch: pytest.MonkeyPatch, equal: Callable[[int], bool]) -> None:
    """Has problems give equal rewards, or 0 and 1 in turn by sample."""
    given: Counter[int] = Counter()

    def step(self: Instance, response: str) -> StepResult:
        given[self.index] += 1
        reward = 1.0 if equal(self.index) else float(given[self.index] % 2)
        return StepResult(reward=reward, done=True)

    monkeypatch.setattr(Instance, "step", step)


def trained_groups(cluster: Any, step: int) -> set[str]:
    return {one.group_id for one in cluster.trajectories if one.step == step}


def draws(tiny_model: Path, most: int) -> RunSpec:
    return make_spec(tiny_model, batch={"dynamic_sampling": most}, evaluation={"problems": 0})


async def test_groups_with_equal_rewards_are_dropped_and_others_drawn_from_problems_of_their_own(
    tiny_model: Path, behaviour: Behaviour, make_cluster: Any, make_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    graded(monkeypatch, lambda index: index in {1, 4 + 2})  # the second group of step 0, and its first other one
    cluster = make_cluster(draws(tiny_model, 2), echo)
    await drive_to_end(cluster, make_client(cluster))
    assert cluster.run.status is RunStatus.FINISHED
    assert trained_groups(cluster, 0) == {"s0.g0", "s0.g1.d2"}
    assert trained_groups(cluster, 1) == {"s1.g0", "s1.g1"}
    assert dict(cluster.dropped) == {"equal_rewards": 2 * 3}
    assert cluster.settled()
    assert [event.key for event in cluster.named("group_redrawn")] == ["s0.g1", "s0.g1.d1"]
    told = {event.key: (event.values["dropped"], event.values["equal"]) for event in cluster.named("dynamic_sampling")}
    assert told == {"0": (2.0, 0.0), "1": (0.0, 0.0)}
    assert set(behaviour.resets) >= {0, 1, 2, 3, 6, 7}
    assert not set(behaviour.resets) & {4, 5}  # those of the first group


async def test_the_draws_are_bounded_and_the_last_group_is_trained_on_whatever_its_rewards(
    tiny_model: Path, behaviour: Behaviour, make_cluster: Any, make_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    graded(monkeypatch, lambda index: True)
    cluster = make_cluster(draws(tiny_model, 3), echo)
    await drive_to_end(cluster, make_client(cluster))
    assert trained_groups(cluster, 0) == {"s0.g0.d3", "s0.g1.d3"}
    assert cluster.dropped["equal_rewards"] == 2 * 2 * 3 * 3
    assert cluster.counters["trained"] == 2 * 2 * 3
    assert cluster.named("dynamic_sampling")[0].values == {"step": 0.0, "dropped": 6.0, "equal": 2.0, "groups": 2.0}


async def test_without_it_groups_with_equal_rewards_are_kept(
    tiny_model: Path, behaviour: Behaviour, make_cluster: Any, make_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    graded(monkeypatch, lambda index: True)
    cluster = make_cluster(draws(tiny_model, 0), echo)
    await drive_to_end(cluster, make_client(cluster))
    assert trained_groups(cluster, 0) == {"s0.g0", "s0.g1"}
    assert not cluster.named("dynamic_sampling")
    assert not cluster.dropped


async def test_a_driver_that_restarts_draws_the_same_once_the_first_group_is_gone(
    tiny_model: Path, behaviour: Behaviour, make_cluster: Any, make_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    graded(monkeypatch, lambda index: index in {0, 4 + 0})
    cluster = make_cluster(draws(tiny_model, 2), lambda request: None if ".d1" in request.group_id else echo(request))
    cluster.announce(0)
    former = asyncio.create_task(drive(make_client(cluster), cluster.lease("driver"), SETTINGS))
    await wait_until(lambda: any(".d1" in one.group_id for one in cluster.rollouts.values()))
    assert cluster.dropped["equal_rewards"] == 3
    former.cancel()
    await asyncio.wait({former})
    cluster.engine = echo
    cluster.answer()
    await drive_to_end(cluster, make_client(cluster))
    assert cluster.run.status is RunStatus.FINISHED
    assert trained_groups(cluster, 0) == {"s0.g0.d2", "s0.g1"}
    assert cluster.dropped["equal_rewards"] == 2 * 3
    assert cluster.settled()
