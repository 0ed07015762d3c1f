"""Rollouts that the coordinator takes from one worker to give them to another."""

from functools import partial
from typing import Any

import pytest

from ebbtide.coordinator.dispatch import rebalancer
from ebbtide.coordinator.dispatch.moves import rebalance
from ebbtide.coordinator.rules.move_costs import MoveCosts
from ebbtide.types.fleet import EndCause
from ebbtide.v1 import fleet_pb2, types_pb2
from tests.support.waiting import wait_until

STOP = types_pb2.FINISH_REASON_STOP


async def paced(cluster: Any, worker: Any, tokens_per_s: int) -> None:
    """Heartbeats from which the coordinator learns how fast the worker is with what it has."""
    session = next(s for s in cluster.coordinator.state.sessions.values() if s.worker_id == worker.worker_id)
    seen = cluster.coordinator.rounds._moves._beats
    for second in (1.0, 2.0, 3.0):
        await worker.beat(tokens_generated=int(second * tokens_per_s), busy_s=second, uptime_s=second)

        def taken_in(second: float = second) -> bool:
            return session.session_id in seen and seen[session.session_id].beat.uptime_s == second

        await wait_until(taken_in, what="the heartbeat is taken in")
    await worker.beat(held=True)  # so that nobody wonders why it makes nothing from here on


async def crowded(cluster: Any, running: int, waiting: int = 0) -> tuple[Any, Any]:
    """A worker that makes 40 tokens/s with all that it runs, beside what waits in it."""
    run, worker = await cluster.run(), await cluster.worker("w1", slots=32)
    names = [f"r{number}" for number in range(running)]
    await run.submit(*names)
    await worker.has(*names)
    await worker.send(*(worker.delta(name, 0, 1) for name in names))
    await paced(cluster, worker, 40)
    late = [f"q{number}" for number in range(waiting)]
    if late:
        await run.submit(*late)
        await worker.has(*late)
    return run, worker


async def test_what_waits_in_one_worker_goes_to_an_idle_one_but_for_the_first(cluster: Any) -> None:
    run, full = await crowded(cluster, running=4, waiting=3)
    idle = await cluster.worker("w2")
    for name in ("q2", "q1"):  # one at a time: else it would wait there
        await wait_until(lambda: full.asked, what="it is asked for the last that waits")
        assert full.asked == [name]
        await full.hand_back(*full.asked, cause=EndCause.MOVED)
        full.asked.clear()
        await idle.has(name)
        assert (await idle.add(name, 0, 2, STOP)).finished
    assert await run.count("moved") == 2
    counters = (await run.get()).counters
    assert (counters["attempts"], counters.get("resumed_midway", 0)) == (9, 0)
    assert not any(name.startswith("detection") for name in counters)
    rounds = cluster.coordinator.rounds._moves
    after = rounds._next + 8 * 0.25
    await wait_until(lambda: rounds._next >= after, what="further rounds")
    assert full.asked == []  # whoever is first is being prefilled, and would be so anywhere


async def test_a_running_rollout_goes_where_it_ends_sooner_and_keeps_its_tokens(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = MoveCosts(least_stay_s=0.2, prefill_tokens_per_s=1e6, handover_s=0.01)
    monkeypatch.setattr(rebalancer, "rebalance", partial(rebalance, costs=costs))
    run, full = await crowded(cluster, running=8)
    fast = await cluster.worker("w2")
    sessions = cluster.coordinator.state.sessions
    await wait_until(lambda: all(one.installed for one in sessions.values()), what="both have the weights")
    await run.submit("x")
    await fast.has("x")  # nothing is known of it, but it is idle
    await fast.add("x", 0, 1)
    await paced(cluster, fast, 40)  # alone, eight times as fast
    await wait_until(lambda: full.asked, what="it is asked for some")
    name = full.asked[0]
    await full.add(name, 1, 3)  # what it still has it sends first
    await full.hand_back(name, cause=EndCause.MOVED)
    await fast.has(name)
    assert len(fast.assigned[name].partial) == 4 * 12
    assert (await fast.add(name, 4, 1, STOP)).finished
    assert await run.count("moved") == 1
    assert await run.count("resumed_midway") == 1
    assert len(set(full.asked)) == len(full.asked)  # asked once for each


async def test_a_worker_is_not_asked_twice_for_one_rollout(cluster: Any) -> None:
    run, full = await crowded(cluster, running=4, waiting=2)
    idle = await cluster.worker("w2", slots=32)
    await wait_until(lambda: full.asked, what="it is asked")
    rounds = cluster.coordinator.rounds._moves
    after = rounds._next + 4 * 0.25
    await wait_until(lambda: rounds._next >= after, what="further rounds")
    assert full.asked == ["q1"]
    await full.hand_back("q1", cause=EndCause.MOVED)
    await idle.has("q1")
    await full.add("q0", 0, 1)
    await run.submit("x")  # and now somebody else waits behind it
    await wait_until(lambda: "x" in full.assigned or "x" in idle.assigned, what="it is placed")
    after = rounds._next + 8 * 0.25
    await wait_until(lambda: rounds._next >= after, what="further rounds")
    assert "q1" not in idle.asked  # nor is the next worker that has it


async def test_nothing_moves_where_balancing_is_off(cluster_with: Any) -> None:
    async with cluster_with(rebalance=False) as cluster:
        _, full = await crowded(cluster, running=4, waiting=2)
        await cluster.worker("w2")
        rounds = cluster.coordinator.rounds._moves
        after = rounds._next + 7 * 0.25  # beyond the second after which they count as stuck
        await wait_until(lambda: rounds._next >= after, what="some rounds")
        assert full.asked == []


async def test_a_worker_holds_few_rollouts_that_have_not_started(cluster: Any) -> None:
    run, worker = await cluster.run(), await cluster.worker("w1", slots=40)
    names = [f"r{number}" for number in range(40)]
    await run.submit(*names)
    await wait_until(lambda: len(worker.assigned) == 20, what="half of its slots is given: it had nothing")
    assert await run.count("queued") == 20
    started = list(worker.assigned)
    await worker.send(*(worker.delta(name, 0, 1) for name in started[:14]))
    await wait_until(lambda: len(worker.assigned) == 24, what="a quarter of its slots may wait in it from then on")
    assert await run.count("running") == 24
    other = await cluster.worker("w2", slots=40)
    await wait_until(lambda: len(other.assigned) == 16, what="the next one has the rest at once")


async def test_a_worker_that_attaches_again_is_asked_again(cluster: Any) -> None:
    run, full = await crowded(cluster, running=4, waiting=2)
    idle = await cluster.worker("w2")
    await wait_until(lambda: full.asked == ["q1"], what="it is asked")
    held = [fleet_pb2.HeldAttempt(attempt=one.attempt) for one in full.assigned.values()]
    again = await cluster.worker("w1", slots=32, held=held)  # its streams broke, and the request with them
    assert len(again.attached.adopted) == 6
    again.assigned = dict(full.assigned)
    await again.beat(held=True)
    await wait_until(lambda: again.asked == ["q1"], what="it is asked again")
    await again.hand_back("q1", cause=EndCause.MOVED)
    await idle.has("q1")
    assert await run.count("moved") == 1


async def test_a_rollout_that_is_moved_and_moved_is_no_poison(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where its worker hands it back after the move was given up."""
    monkeypatch.setattr(rebalancer, "_HANDOVER_S", 0.0)
    run, full = await crowded(cluster, running=4, waiting=2)
    idle = await cluster.worker("w2")
    await wait_until(lambda: full.asked, what="it is asked")
    running = cluster.coordinator.state.runs["r"].running
    await wait_until(lambda: not running["q1"].target, what="the move is given up")
    holder, other = full, idle
    for _ in range(6):
        await holder.hand_back("q1", cause=EndCause.MOVED)
        await wait_until(lambda: "q1" in full.assigned or "q1" in idle.assigned, what="somebody has it")
        holder, other = (full, idle) if "q1" in full.assigned else (idle, full)
    assert "q1" not in other.assigned
    assert running["q1"].rollout.no_progress == 0
    assert await run.count("dead_lettered") == 0


async def test_a_failure_in_the_midst_of_a_move_is_held_against_the_rollout(cluster: Any) -> None:
    run, full = await crowded(cluster, running=4, waiting=2)
    await cluster.worker("w2")
    await wait_until(lambda: full.asked == ["q1"], what="it is asked")
    await full.hand_back("q1", cause=EndCause.FAILED, reason="the engine died")
    running = cluster.coordinator.state.runs["r"].running
    await wait_until(lambda: "q1" in running and running["q1"].number == 2, what="somebody has it")
    assert running["q1"].rollout.no_progress == 1
    assert await run.count("moved") == 0


async def test_what_was_to_move_is_moved_though_its_worker_drains_meanwhile(cluster: Any) -> None:
    run, full = await crowded(cluster, running=4, waiting=2)
    idle = await cluster.worker("w2")
    await wait_until(lambda: full.asked == ["q1"], what="it is asked")
    await full.say(draining=fleet_pb2.Draining(deadline_s=5.0, reason="asked"))
    await full.hand_back("q1", cause=EndCause.MOVED)
    await idle.has("q1")
    assert await run.count("moved") == 1
