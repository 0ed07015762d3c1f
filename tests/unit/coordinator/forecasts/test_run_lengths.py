"""A run's forecasts never hold its coordinator up: not while a mirror is read again, and not by a fault."""

import gc
import weakref
from typing import Any

import pytest
from structlog.testing import capture_logs

from ebbtide.coordinator.dispatch import dispatch_round
from ebbtide.coordinator.dispatch.dispatch_round import SlotFill
from ebbtide.coordinator.forecasts import length_forecasts
from ebbtide.coordinator.forecasts.length_learner import LengthLearner
from ebbtide.coordinator.forecasts.run_forecasts import RunForecasts
from ebbtide.coordinator.rules.rollout_queue import QueuedRollout, RolloutQueue
from ebbtide.coordinator.state.notifier import DispatchWakeups
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.running_attempt import RunningAttempt
from ebbtide.step_pacing import VersionBounds
from ebbtide.types.run import BatchSpec, EnvironmentSpec, RunSpec, Sampling, TailSpec
from tests.unit.coordinator.virtual_fleet import VERSION, VirtualFleet

CAP = 1 << 16
SPEC = RunSpec(
    name="r",
    model="m",
    environment=EnvironmentSpec(name="e"),
    sampling=Sampling(max_tokens=CAP),
    batch=BatchSpec(groups_per_step=2),
    tail=TailSpec(order="lengths"),
)
#: Of each group of eight; the others wait.
RUNNING = 3


def queued(place: int, *, made: int = 0) -> QueuedRollout:
    return QueuedRollout(
        rollout_id=f"x{place}", episode_id=f"x{place}", bounds=VersionBounds(0, 0), length=100, place=place,
        group=place - place % 8, budget=CAP - made, made=made, step=1,
    )  # fmt: skip


def attempt(run: RunState, place: int, made: int) -> RunningAttempt:
    one = run.new_attempt(f"a{place}", queued(place), start=0, max_tokens=CAP)
    one.stored = made
    return one


class Mirror:
    """A run whose mirror was read again: `groups` groups of eight, some of each of which run."""

    def __init__(self, groups: int) -> None:
        self.run = RunState("r", SPEC, DispatchWakeups(), lambda: 0.0)
        self.now = 1.0
        queue, running = self.run.new_queue(), list[RunningAttempt]()
        for place in range(8 * groups):
            if place % 8 < RUNNING:
                running.append(attempt(self.run, place, 100 * (place // 8)))
            else:
                queue.add(queued(place))
        self.run.reread({}, queue, {one.rollout.rollout_id: one for one in running})

    def foresee(self) -> bool:
        return self.run.foresee(self.now, heard=True)

    def take(self) -> None:
        while self.foresee():
            pass

    @property
    def open(self) -> tuple[set[str], set[str]]:
        """What the forecasts know to run, and to wait."""
        groups = list(self.run.lengths.forecasts.groups)
        return {one for group in groups for one in group.running}, {one for group in groups for one in group.waiting}


class Work:
    """Counts what is done at a time."""

    def __init__(self) -> None:
        self.named = self.forecast = self.ranked = 0

    def taken(self) -> tuple[int, int, int]:
        found = self.named, self.forecast, self.ranked
        self.named = self.forecast = self.ranked = 0
        return found


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    counted = Work()

    def count(owner: type, method: str, name: str, size: Any = lambda *_: 1) -> None:
        plain = getattr(owner, method)

        def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
            setattr(counted, name, getattr(counted, name) + size(*args))
            return plain(self, *args, **kwargs)

        monkeypatch.setattr(owner, method, counting)

    count(RunForecasts, "run", "named")
    count(RunForecasts, "wait", "named")
    count(LengthLearner, "forecast", "forecast")
    count(RolloutQueue, "rerank_all", "ranked", len)
    return counted


def test_a_large_mirror_is_taken_in_small_steps_and_no_rollout_is_forecast_or_ranked_twice(work: Work) -> None:
    mirror = Mirror(600)
    steps = [work.taken()]
    while mirror.foresee():
        steps.append(work.taken())
    last = work.taken()
    assert all(
        named <= length_forecasts.PAGE and ranked <= length_forecasts.PAGE for named, _, ranked in [*steps, last]
    )
    assert all(forecast <= 1 for _, forecast, _ in steps)  # that of groups of which nothing is known
    assert last[1] <= 33
    assert sum(named for named, _, _ in [*steps, last]) == 8 * 600
    ranked = sum(ranked for _, _, ranked in [*steps, last])
    assert 0 <= ranked - (8 - RUNNING) * 600 <= (8 - RUNNING) * 16, "some are ranked by the first renewal, too"
    assert tuple(map(len, mirror.open)) == (RUNNING * 600, (8 - RUNNING) * 600)


def test_a_mirror_that_was_taken_is_in_the_order_of_its_ranks() -> None:
    mirror = Mirror(200)
    mirror.take()
    for _ in range(400):  # until each group has its own forecast
        mirror.now += 0.1
        mirror.foresee()
    groups = [one.group for one in mirror.run.queue]
    assert min(groups[:100]) > 8 * 140 > 8 * 60 > max(groups[-100:])  # the later ones' samples have made most


def test_what_happens_while_a_mirror_is_taken_counts() -> None:
    mirror = Mirror(600)
    run = mirror.run
    last_running, last_waiting = f"x{8 * 599}", f"x{8 * 599 + 7}"
    assert mirror.foresee()
    run.finish(last_running, f"a{8 * 599}")
    run.end(last_waiting)
    run.end("x0")
    run.admit(queued(8 * 600))
    mirror.take()
    running, waiting = mirror.open
    assert running == run.running.keys()
    assert waiting == {one.rollout_id for one in run.queue}
    assert not {last_running, "x0"} & running
    assert last_waiting not in waiting
    assert f"x{8 * 600}" in waiting


def test_a_mirror_that_is_read_again_while_it_is_taken_is_taken_anew() -> None:
    mirror = Mirror(600)
    assert mirror.foresee()
    queue = mirror.run.new_queue()
    queue.add(queued(4))
    mirror.run.reread({}, queue, {})
    mirror.take()
    assert mirror.open == (set(), {"x4"})


def test_other_runs_are_served_after_some_pages_and_a_run_is_once_all_of_it_is_ranked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch_round, "_PAGES", 1)
    fleet = VirtualFleet(tail=TailSpec(order="lengths"))
    fleet.attach("w1")
    other = fleet.state.add_run("other", SPEC)
    with other.mirror.rereading():
        other.mirror.note_reconciled()
    fleet.attach("w2").serve("other", fleet.now)
    other.admit(queued(0))
    queue = fleet.run.new_queue()
    for place in range(3 * length_forecasts.PAGE):
        queue.add(queued(place))
    fleet.run.reread({1: VERSION}, queue, {})

    def filled() -> list[str]:
        """The runs whose slots the next round fills. Nothing is arranged in it."""
        return [action.run.run_id for action in fleet.rounds.steps(fleet.now + 0.01) if isinstance(action, SlotFill)]

    for _ in range(5):  # two more pages of names and three of ranks
        assert filled() == ["other"]
        assert fleet.rounds.pause_s(fleet.now) == 0.0
    assert filled() == ["r", "other"]
    assert fleet.rounds.pause_s(fleet.now) > 0.0
    assert [one.place for one in fleet.run.queue][:4] == [0, 8, 16, 24]  # a probe of each group


def live_through(run: RunState) -> None:
    """All that happens to the rollouts of some groups."""
    for step in range(4):
        for place in range(8 * step, 8 * step + 4):
            run.admit(queued(place))
        for one in list(run.queue):
            run.take_queued(one.rollout_id)
            begun = attempt(run, one.place, 0)
            run._running[one.rollout_id] = begun
            run.lengths.started(begun, run.queue)
            begun.foresee()
            run.finish(one.rollout_id, begun.attempt_id)
        run.foresee(10.0 * step + 10.0)


@pytest.mark.parametrize("method", ["groups_ended", "forecast", "kind"])
def test_a_fault_in_statistics_ends_a_runs_forecasts_and_nothing_else(method: str, monkeypatch: Any) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr(LengthLearner, method, fails)
    run = RunState("r", SPEC, DispatchWakeups(), lambda: 0.0)
    with capture_logs() as said:
        live_through(run)
    assert [(one["log_level"], one["run_id"]) for one in said] == [("error", "r")]
    assert not run.running
    assert not run.lengths.forecasts.known
    run.admit(queued(80))
    assert [one.rollout_id for one in run.queue] == ["x80"]
    run.reread({}, run.new_queue(), {})
    assert not run.foresee(1_000.0)


def test_a_run_that_ends_before_its_mirror_was_taken_is_freed_without_a_garbage_collection() -> None:
    mirror = Mirror(200)
    assert mirror.foresee()  # there are further pages
    run = weakref.ref(mirror.run)
    gc.disable()
    try:
        mirror.run.close()
        mirror.run.clear()
        del mirror
        assert run() is None
    finally:
        gc.enable()
