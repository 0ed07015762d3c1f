"""What the coordinator tells a trainer of its run's open groups and engines."""

import asyncio

import pytest
from msgspec.structs import replace

from ebbtide.coordinator.api.remaining_work import RemainingWorkReader
from ebbtide.coordinator.forecasts.throughput import WorkerThroughput
from ebbtide.coordinator.state.running_attempt import RunningAttempt
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.errors import InvalidRequest, LeaseSuperseded
from ebbtide.types.remaining_work import MOST_GROUPS, RemainingWork
from tests.unit.coordinator.model_fleet import ModelFleet, rollout


class WorkFleet(ModelFleet):
    """Groups of rollouts that run, wait or have ended."""

    def __init__(self, workers: int = 2) -> None:
        super().__init__(workers, slots=1 << 16)
        self.speeds = dict[str, WorkerThroughput]()
        self.reader = RemainingWorkReader(self.state, lambda one: (self.speeds.get(one.worker_id), 0.0))
        for session in self.state.sessions.values():
            session.note_installed(self.run.run_id, self.version(1))

    def session(self, name: str) -> WorkerSession:
        return next(one for one in self.state.sessions.values() if one.worker_id == name)

    def runs(self, name: str, group: int, made: int, *, worker: str = "w0", **more: bool) -> RunningAttempt:
        queued = replace(rollout(name, place=group), group=group, **more)
        attempt = RunningAttempt(run=self.run, attempt_id=f"a-{name}", rollout=queued, start=0, max_tokens=99)
        self.run.start(attempt, self.session(worker))
        if made:
            attempt.begin(0.0)
            attempt.believe_stored(made)
        return attempt

    def waits(self, name: str, group: int, made: int = 0) -> None:
        queued = rollout(name, place=group, length=100 + made)
        self.run.admit(replace(queued, group=group, made=made))

    def ends(self, name: str, group: int, tokens: int) -> None:
        attempt = self.runs(name, group, tokens)
        self.run.finish(name, attempt.attempt_id)

    async def left(self, *, groups: int = 1_000, fleet: str = "", wait_s: float = 0.0) -> RemainingWork:
        return await self.reader.read(self.run.run_id, groups=groups, fleet=fleet, wait_s=wait_s)

    def learns(self, name: str, tokens_per_s: float) -> None:
        speed = self.speeds[name] = WorkerThroughput()
        for _ in range(10):
            speed.observe(8, 500.0, round(8 * tokens_per_s), 1.0)


async def test_a_group_is_told_with_what_runs_and_what_waits() -> None:
    fleet = WorkFleet()
    fleet.ends("a", 0, 40)
    fleet.runs("b", 0, 30)
    fleet.runs("c", 0, 0)
    fleet.waits("d", 0, made=5)
    fleet.waits("e", 4)
    left = await fleet.left()
    first, second = left.groups
    assert (first.prompt, first.running) == (100, (30,))
    assert sorted(first.waiting) == [0, 5]
    assert second.waiting == (0,)
    assert (left.open, left.ended) == (2, 0)


async def test_groups_whose_responses_have_all_ended_are_counted_until_their_episodes_are_over() -> None:
    fleet = WorkFleet()
    fleet.ends("a", 0, 40)
    assert (await fleet.left()).ended == 1
    fleet.state.episode_over(fleet.run, "a")
    assert (await fleet.left()).ended == 0


async def test_evaluation_and_requests_are_none_of_a_trainers_work() -> None:
    fleet = WorkFleet()
    fleet.runs("v", 0, 10, evaluation=True)
    fleet.runs("q", 1, 10, request=True)
    attempt = fleet.runs("w", 2, 10, evaluation=True)
    fleet.run.finish("w", attempt.attempt_id)
    left = await fleet.left()
    assert (left.open, left.ended, left.groups) == (0, 0, ())


async def test_of_many_groups_the_oldest_count_and_some_are_told() -> None:
    fleet = WorkFleet()
    for number in range(600):
        fleet.waits(f"x{number}", number, made=number)
    left = await fleet.left(groups=500)
    made = [group.waiting[0] for group in left.groups]
    assert left.open == 500
    assert len(made) == MOST_GROUPS
    assert made == sorted(made)
    assert made[0] < 10
    assert 485 < made[-1] < 500


async def test_engines_are_told_with_their_speeds_among_each_other() -> None:
    fleet = WorkFleet(3)
    for name, speed in (("w0", 30.0), ("w1", 30.0), ("w2", 10.0)):
        fleet.learns(name, speed)
    fleet.runs("a", 0, 10, worker="w1")
    left = await fleet.left()
    assert left.engines == ("w0", "w1", "w2")
    assert left.rollouts == (0, 1, 0)
    assert left.versions == (1, 1, 1)
    assert left.speeds[0] == pytest.approx(left.speeds[1])
    assert left.speeds[0] == pytest.approx(3.0 * left.speeds[2], rel=0.01)
    assert left.step_s + left.rollout_s > 0.0


async def test_a_call_that_waits_answers_as_soon_as_the_fleet_changes() -> None:
    fleet = WorkFleet(1)
    first = await fleet.left()
    waiting = asyncio.create_task(fleet.left(fleet=first.fleet, wait_s=20.0))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waiting.done()
    fleet.attach("w9")
    second = await asyncio.wait_for(waiting, 5)
    assert second.engines == ("w0", "w9")
    assert second.versions == (1, 0)
    assert second.fleet != first.fleet


async def test_workers_that_leave_do_not_count() -> None:
    fleet = WorkFleet(2)
    fleet.session("w0").drain("asked")
    assert (await fleet.left()).engines == ("w1",)


async def test_a_run_that_is_over_and_a_wait_that_is_too_long_are_refused() -> None:
    fleet = WorkFleet()
    with pytest.raises(InvalidRequest, match="wait_s"):
        await fleet.left(wait_s=21.0)
    fleet.state.drop_run(fleet.run)
    with pytest.raises(LeaseSuperseded):
        await fleet.left()


async def test_many_rollouts_are_read_a_page_at_a_time() -> None:
    """Other calls have their turn in between."""
    fleet = WorkFleet(1)
    for number in range(4_000):
        fleet.waits(f"x{number}", number // 8)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    beside = asyncio.create_task(others())
    await fleet.left()
    beside.cancel()
    assert turns >= 4_000 // 512 - 1


def test_a_rollout_that_is_queued_again_between_two_pages_is_told_once() -> None:
    fleet = WorkFleet(1)
    attempts = [fleet.runs(f"x{number}", 0, 3) for number in range(600)]
    gathering = fleet.reader.gather(fleet.run, 10)
    next(gathering)
    fleet.run.put_back(attempts[0], attempts[0].rollout)
    left = None
    while left is None:
        try:
            next(gathering)
        except StopIteration as done:
            left = done.value
    (group,) = left.groups
    assert len(group.running) + len(group.waiting) == 600
