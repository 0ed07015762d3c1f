"""Borrowed workers: what leaves one whose host takes itself back, what comes again, and who is given up."""

import asyncio
import random
import time
from collections import Counter
from typing import Any, Final

import pytest

from ebbtide.coordinator.dispatch import rebalancer
from ebbtide.coordinator.fleet import worker_health
from ebbtide.coordinator.rules import move_costs
from ebbtide.types.fleet import EndCause
from ebbtide.types.run import BorrowSpec
from ebbtide.types.tokens import TOKEN_BYTES
from ebbtide.v1 import fleet_pb2, fleet_pb2_grpc, types_pb2
from tests.support.waiting import wait_until

STOP: Final = types_pb2.FINISH_REASON_STOP
BORROWED: Final = types_pb2.WORKER_KIND_BORROWED
#: Rounds of the coordinator, a quarter of a second each.
ROUND_S: Final = 0.25


async def says(worker: Any, *, granted: bool = True, **more: Any) -> None:
    """A heartbeat with what the worker knows of its host."""
    said = fleet_pb2.Borrowed(**({"granted": granted, "share": 0.8, "spell_s": 60.0} | more))
    await worker.beat(held=not granted, borrowed=said)


async def lent(cluster: Any, name: str, *, slots: int = 8, **said: Any) -> Any:
    worker = await cluster.worker(name, slots=slots, kind=BORROWED)
    await says(worker, **said)
    await wait_until(lambda: worker.borrows, what="it is told that its host is wanted")
    return worker


async def rounds(cluster: Any, number: int) -> None:
    moves = cluster.coordinator.rounds._moves
    after = moves._next + number * ROUND_S
    await wait_until(lambda: moves._next >= after, what="further rounds")


def session(cluster: Any, worker: Any) -> Any:
    return next(s for s in cluster.coordinator.state.sessions.values() if s.worker_id == worker.worker_id)


async def listed(cluster: Any, name: str) -> Any:
    fleet: Any = fleet_pb2_grpc.FleetStub(cluster.channel)
    answer = await cluster.call(fleet.ListWorkers, fleet_pb2.ListWorkersRequest())
    return next(one for one in answer.workers if one.worker_id == name)


async def busy(cluster: Any, **said: Any) -> tuple[Any, Any]:
    """A borrowed worker that has made three tokens of each of two rollouts."""
    run, worker = await cluster.run(), await lent(cluster, "lent", **said)
    await run.submit("a", "b")
    await worker.has("a", "b")
    await worker.send(worker.delta("a", 0, 3), worker.delta("b", 0, 3))
    return run, worker


async def test_a_borrowed_worker_gets_work_once_it_has_a_grant(cluster: Any) -> None:
    run = await cluster.run()
    worker = await cluster.worker("lent", kind=BORROWED)
    await run.submit("a")
    await rounds(cluster, 2)
    assert not worker.assigned
    await says(worker)
    await worker.has("a")
    assert [told.wanted for told in worker.borrows] == [True]


async def test_a_short_reclaim_moves_nothing(cluster: Any) -> None:
    _, worker = await busy(cluster)
    steady = await cluster.worker("steady")
    for _ in range(3):
        await says(worker, granted=False, spell_s=300.0)
        await rounds(cluster, 3)
        await says(worker)
        await rounds(cluster, 1)
    assert worker.asked == []
    assert not steady.assigned


async def test_a_long_one_moves_everything_once_and_no_token_is_regenerated(cluster: Any) -> None:
    run, worker = await busy(cluster)
    steady = await cluster.worker("steady")
    await says(worker, granted=False, spell_s=300.0)
    await wait_until(lambda: len(worker.asked) == 2, what="it is asked for both")
    await rounds(cluster, 3)
    assert sorted(worker.asked) == ["a", "b"]
    await worker.add("a", 3, 2)  # what it had made before is flushed first
    await worker.hand_back("a", "b", cause=EndCause.MOVED)
    await steady.has("a", "b")
    assert len(steady.assigned["a"].partial) == 5 * TOKEN_BYTES
    assert (await steady.add("a", 5, 1, STOP)).finished
    counters = (await run.get()).counters
    assert (counters["moved"], counters.get("tokens_lost", 0)) == (2, 0)
    assert all(one.rollout.no_progress == 0 for one in cluster.coordinator.state.runs["r"].running.values())


async def test_what_is_not_released_is_asked_for_again(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rebalancer, "_AGAIN_S", 0.3)
    _, worker = await busy(cluster)
    await cluster.worker("steady")
    await says(worker, granted=False, spell_s=300.0)
    await wait_until(lambda: sorted(worker.asked) == ["a", "a", "b", "b"], what="it is asked twice")
    await worker.hand_back("a", "b", cause=EndCause.MOVED)
    asked = len(worker.asked)
    await rounds(cluster, 3)
    assert len(worker.asked) <= asked + 2  # one that was on its way


async def test_who_never_releases_is_suspected(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_health, "_OBEYS_S", 0.5)
    _, worker = await busy(cluster)
    steady = await cluster.worker("steady")
    await says(worker, granted=False, spell_s=300.0)
    await wait_until(lambda: worker.ended is not None, what="it is suspected")
    await steady.has("a", "b")
    assert "handed back" in (await listed(cluster, "lent")).reason


async def test_it_is_filled_again_when_its_host_lends_itself_again(cluster: Any) -> None:
    run, worker = await busy(cluster)
    await says(worker, granted=False, spell_s=300.0)
    await run.submit("c")
    await rounds(cluster, 2)
    assert "c" not in worker.assigned
    await says(worker)
    await worker.has("c")
    assert worker.asked == []  # with nobody else its own waited there


async def test_with_no_other_worker_rollouts_wait_without_suspicion(cluster: Any) -> None:
    run, worker = await busy(cluster)
    cluster.coordinator.fleet._health._progress._ceiling_s = 0.5
    worker.beats(held=True, borrowed=fleet_pb2.Borrowed(spell_s=600.0))
    await rounds(cluster, 14)
    assert (await listed(cluster, "lent")).running == 2
    assert await run.count("dead_lettered") == 0
    spot = await cluster.worker("spot")
    await run.submit("c")
    await spot.has("c")
    spot.beats(held=True)  # which has no such excuse
    await wait_until(lambda: spot.ended is not None, what="it is suspected")
    assert worker.ended is None


async def test_the_listing_says_what_a_host_lends(cluster: Any) -> None:
    await lent(cluster, "lent", granted=True, share=0.25, spell_s=7.0, asleep=True)
    await wait_until(lambda: session(cluster, cluster._workers[0]).beat.borrowed, what="it is heard")
    one = await listed(cluster, "lent")
    assert (one.borrowed.granted, one.borrowed.share, one.borrowed.spell_s, one.borrowed.asleep) == (
        True,
        0.25,
        7.0,
        True,
    )
    assert not one.given_up


async def test_a_host_whose_users_suffer_is_given_up_and_its_rollouts_go_elsewhere(cluster: Any) -> None:
    run, worker = await busy(cluster)
    steady = await cluster.worker("steady")
    await says(worker, disturbance=1.0)
    await wait_until(lambda: not worker.borrows[-1].wanted, what="it is told")
    assert "error budget" in worker.borrows[-1].reason
    await wait_until(lambda: len(worker.asked) == 2, what="it is asked for all")
    await worker.hand_back("a", "b", cause=EndCause.MOVED)
    await steady.has("a", "b")
    one = await listed(cluster, "lent")
    assert one.given_up
    assert "error budget" in one.reason
    await run.submit(*(f"x{number}" for number in range(20)))
    await rounds(cluster, 2)
    assert not worker.assigned
    known = cluster.coordinator.rounds._borrowed._borrowing._hosts["lent"]
    known.until = 0.0  # its pause is over
    await says(worker, disturbance=0.0)
    await wait_until(lambda: worker.assigned, what="it is borrowed again")
    assert [told.wanted for told in worker.borrows] == [True, False, True]


async def test_a_run_borrows_no_more_than_it_may(cluster: Any) -> None:
    run = await cluster.run(borrow=BorrowSpec(max_rollouts=2))
    worker = await lent(cluster, "lent")
    await run.submit(*(f"r{number}" for number in range(5)))
    await wait_until(lambda: len(worker.assigned) == 2, what="it has as many as it may")
    await rounds(cluster, 2)
    assert len(worker.assigned) == 2
    name = next(iter(worker.assigned))
    assert (await worker.add(name, 0, 1, STOP)).finished
    await wait_until(lambda: len(worker.assigned) == 3, what="and the next behind the first")
    steady = await cluster.worker("steady")
    await wait_until(lambda: len(steady.assigned) == 2, what="others have the rest")


async def test_a_run_that_may_borrow_nothing_says_so(cluster: Any) -> None:
    run = await cluster.run(borrow=BorrowSpec(max_rollouts=0))
    worker = await lent(cluster, "lent")
    await run.submit("a")
    (event,) = await run.events("warning", 1)
    assert "borrow.max_rollouts is 0" in event.message
    assert not worker.assigned
    await (await cluster.worker("steady")).has("a")


async def test_a_worker_lost_while_its_host_had_itself_back_is_no_fault_of_its_rollouts(cluster: Any) -> None:
    run, worker = await cluster.run(), await lent(cluster, "lent")
    await run.submit("a")
    await worker.has("a")
    await says(worker, granted=False)
    await wait_until(lambda: session(cluster, worker).reclaimed, what="it is heard")
    await worker.break_streams()  # its guard killed it
    steady = await cluster.worker("steady")
    await steady.has("a")
    assert cluster.coordinator.state.runs["r"].running["a"].rollout.no_progress == 0


def test_of_user_traffic_nothing_but_the_forecast_can_be_told() -> None:
    told = [field.name for field in fleet_pb2.Borrowed.DESCRIPTOR.fields]
    # The last one is a trainer's to say, who has no users.
    assert told == ["granted", "share", "spell_s", "disturbance", "asleep", "hand_over"]
    messages = (fleet_pb2.Attach, fleet_pb2.Heartbeat, fleet_pb2.Released, fleet_pb2.Draining, fleet_pb2.Installed)
    assert [one for one in messages if "borrowed" in one.DESCRIPTOR.fields_by_name] == [fleet_pb2.Heartbeat]


class Mill:
    """A worker that makes a token of each rollout at a time while it may, and hands back what it is asked for. With
    `draw`, its host takes itself back again and again, for a moment or for longer.
    """

    def __init__(self, worker: Any, length: int, made: Counter[str], draw: random.Random | None = None) -> None:
        self._worker, self._length, self._made, self._draw = worker, length, made, draw
        self._granted, self._turns_at = True, 0.0
        self.reclaims = 0

    async def grind(self) -> None:
        while True:
            if self._draw and time.monotonic() >= self._turns_at:
                await self._turn(self._draw)
            asked, self._worker.asked = self._worker.asked, []
            if back := [name for name in asked if name in self._worker.assigned]:
                await self._worker.hand_back(*back, cause=EndCause.MOVED)
            if self._granted and self._worker.assigned:
                await self._step()
            await asyncio.sleep(0.01)

    async def _turn(self, draw: random.Random) -> None:
        self._granted = not self._granted
        long = draw.random() < 0.5
        spell_s = draw.uniform(0.05, 2.0) if self._granted else 30.0 if long else 0.1
        await says(self._worker, granted=self._granted, spell_s=spell_s, share=draw.uniform(0.2, 0.9))
        self.reclaims += not self._granted
        lasts_s = draw.uniform(0.02, 0.2) if self._granted or not long else draw.uniform(0.3, 0.6)
        self._turns_at = time.monotonic() + lasts_s

    async def _step(self) -> None:
        deltas = []
        for name, given in self._worker.assigned.items():
            at = len(given.partial) // TOKEN_BYTES
            deltas.append(self._worker.delta(name, at, 1, STOP if at + 1 == self._length else 0))
            given.partial += b"\0" * TOKEN_BYTES  # so that it knows where it is
            self._made[name] += 1
        for delta, ack in zip(deltas, await self._worker.send(*deltas), strict=True):
            assert ack.stored == delta.offset + 1
            if ack.finished:
                del self._worker.assigned[delta.ref.rollout_id]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("steady", "rollouts"),
    [(1, 60), pytest.param(0, 240, marks=pytest.mark.nightly), pytest.param(1, 240, marks=pytest.mark.nightly)],
)
async def test_however_often_hosts_are_taken_back_no_token_is_lost_and_every_rollout_ends_once(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, steady: int, rollouts: int
) -> None:
    monkeypatch.setattr(move_costs, "SHORT_S", 0.1)
    made, run, length = Counter[str](), await cluster.run(), 24
    mills = [
        Mill(await lent(cluster, f"lent{number}", slots=6), length, made, random.Random(number)) for number in range(4)
    ]
    rest = [Mill(await cluster.worker(f"steady{number}", slots=2), length, made) for number in range(steady)]
    sessions = cluster.coordinator.state.sessions
    await wait_until(lambda: all(one.installed for one in sessions.values()), what="all have the weights")
    names = [f"r{number:03d}" for number in range(rollouts)]
    await run.submit(*names)
    tasks = [asyncio.create_task(mill.grind()) for mill in (*mills, *rest)]
    try:

        async def done() -> bool:
            assert not [task.exception() for task in tasks if task.done()]
            counters = (await run.get()).counters
            return not counters.get("running", 0) + counters.get("queued", 0)

        await wait_until(done, timeout=100, interval=0.2, what="all are finished")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(mill.reclaims for mill in mills) >= rollouts // 4
    finished = await run.finished(len(names))
    assert sorted(one.rollout_id for one in finished) == names
    assert all(len(one.tokens) == length * TOKEN_BYTES for one in finished)
    assert made == dict.fromkeys(names, length)  # each token was made exactly once
    counters = (await run.get()).counters
    assert counters.get("tokens_lost", 0) == counters.get("dead_lettered", 0) == 0
    assert counters.get("moved", 0) > 0


async def test_what_a_trainer_waits_for_leaves_its_device_at_once(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(move_costs, "SHORT_S", 1_000.0)
    _, worker = await busy(cluster)
    steady = await cluster.worker("steady")
    await says(worker, granted=False, spell_s=0.0)
    await rounds(cluster, 2)
    assert worker.asked == []
    await says(worker, granted=False, spell_s=0.0, hand_over=True)
    await wait_until(lambda: sorted(worker.asked) == ["a", "b"], what="it is asked for both")
    await worker.hand_back("a", "b", cause=EndCause.MOVED)
    await steady.has("a", "b")
    assert len(steady.assigned["a"].partial) == 3 * TOKEN_BYTES
