"""Workers that fall silent, stop, or come and go; and rollouts that take their workers with them."""

import asyncio
import time
from typing import Any

from ebbtide.coordinator.dispatch import unserved_work
from ebbtide.coordinator.fleet import worker_health
from ebbtide.errors import NotFound
from ebbtide.types.fleet import EndCause, WorkerState
from ebbtide.types.tokens import pack_ids
from ebbtide.v1 import fleet_pb2, types_pb2
from tests.support.waiting import wait_until

STOP = types_pb2.FINISH_REASON_STOP
SILENT = {"heartbeat_timeout_s": 0.6}


def listed(cluster: Any, worker_id: str) -> Any:
    return next(one for one in cluster.coordinator.fleet.workers() if one.worker_id == worker_id)


async def lose(cluster: Any, worker_id: str) -> None:
    def suspected() -> bool:
        return bool(listed(cluster, worker_id).state is WorkerState.SUSPECTED)

    await wait_until(suspected, what=f"{worker_id} is suspected")


async def silenced(cluster: Any) -> tuple[Any, Any, Any]:
    """A run whose rollout went from a worker that fell silent to another; the silent one is back."""
    run, first = await cluster.run(), await cluster.worker("w1")
    await run.submit("a")
    await first.has("a")
    await first.add("a", 0, 4)
    await lose(cluster, "w1")
    second = await cluster.worker("w2")
    second.beats()
    await second.has("a")
    held = [fleet_pb2.HeldAttempt(attempt=first.assigned["a"].attempt, offset=4)]
    await wait_until(lambda: first.ended, what="the silent worker's session is over")
    again = await cluster.worker("w1", held=held)
    again.beats()
    assert [ref.rollout_id for ref in again.attached.superseded] == ["a"]
    await wait_until(lambda: again.installed, what="it has the weights")
    return run, again, second


async def test_a_silent_worker_is_fenced_and_its_rollouts_avoid_it(cluster_with: Any) -> None:
    async with cluster_with(**SILENT) as cluster:
        run, again, second = await silenced(cluster)
        assert isinstance(again.ended, NotFound) or again.ended is None
        for _ in range(3):
            await second.hand_back("a", cause=EndCause.WRONG_VERSION)
            await second.has("a")
        assert again.assigned == {}
        await second.break_streams()  # nobody else is left
        await again.has("a")
        assert (await again.add("a", 4, 1, STOP)).finished
        counters = (await run.get()).counters
        assert sum(n for name, n in counters.items() if name.startswith("detection:le:")) == 2
        assert counters.get("detection:le:0.5", 0) <= 1  # the silent one was noticed by time alone


async def test_a_silent_worker_is_found_while_the_store_keeps_all_else_waiting(cluster_with: Any) -> None:
    async with cluster_with(**SILENT) as cluster:
        await cluster.worker("w1")
        asked, away = asyncio.Event(), asyncio.Event()

        async def never(now: float) -> None:
            asked.set()
            await away.wait()

        cluster.coordinator._attempts.requeue_due = never
        await wait_until(asked.is_set, what="the store is waited for")
        await lose(cluster, "w1")


async def test_a_rollout_avoids_a_worker_beyond_a_restart_of_the_coordinator(cluster_with: Any) -> None:
    async with cluster_with(**SILENT) as cluster:
        run, _, second = await silenced(cluster)
        await second.hand_back("a", cause=EndCause.WORKER_LEAVES)
        await cluster.restart()
        second = await cluster.worker("w2")  # the first would have it while nobody else is there
        second.beats()
        await second.has("a")
        first = await cluster.worker("w1")
        first.beats()
        await wait_until(lambda: first.installed, what="it has the weights")
        for _ in range(3):
            await second.hand_back("a", cause=EndCause.WRONG_VERSION)
            await second.has("a")
        assert first.assigned == {}
        assert await run.count("finished") == 0


async def test_a_worker_that_makes_no_tokens_is_given_up_though_its_heart_beats(cluster: Any) -> None:
    run, stalled = await cluster.run(), await cluster.worker("w1")
    stalled.beats()
    await run.submit("a")
    await stalled.has("a")
    for offset in range(3):
        await stalled.add("a", offset, 1)
    held = await cluster.worker("w2")
    held.beats(held=True)
    await run.submit("b", "c", "d", "e", "f", "g", "h", "i", "j")  # more than fit beside the first
    await wait_until(lambda: held.assigned, what="the other has some")
    name = next(iter(held.assigned))
    await held.add(name, 0, 1)
    await lose(cluster, "w1")
    assert "no token" in listed(cluster, "w1").reason
    await held.has("a")
    assert listed(cluster, "w2").state is WorkerState.READY


async def test_a_worker_that_pulls_weights_is_still_to_make_tokens(cluster: Any) -> None:
    """Its engine goes on generating meanwhile; only a hold, which a heartbeat tells at once, is waited for."""
    run, stalled = await cluster.run(), await cluster.worker("w1", installs=True)
    await run.submit("a")
    await stalled.has("a")
    stalled.installs = False
    stalled.beats(state=types_pb2.WORKER_STATE_INSTALLING)
    for offset in range(3):
        await stalled.add("a", offset, 1)
    await run.announce(1)
    await lose(cluster, "w1")
    assert "no token" in listed(cluster, "w1").reason


async def test_a_long_prefill_is_no_stall(cluster: Any) -> None:
    run, worker = await cluster.run(), await cluster.worker("w1")
    await run.submit("a", "b")
    await worker.has("a", "b")
    session = next(iter(cluster.coordinator.state.sessions.values()))
    doing = cluster.coordinator.fleet._health._doing(session, time.monotonic())
    assert (doing.started, doing.pending) == (0, 2)
    assert doing.unread == sum(one.rollout.length for one in session.attempts.values()) > 0


async def test_silence_is_for_the_heartbeat_timeout_to_judge_and_lateness_is_no_stall(cluster: Any) -> None:
    """The timeout is 30 s here; the watchdog, whose floor is 2 s, leaves both of them alone."""
    run = await cluster.run()
    silent, late = [await cluster.worker(name, slots=1) for name in ("w1", "w2")]
    await run.submit("a", "b")
    await wait_until(lambda: silent.assigned and late.assigned, what="each has one")
    for worker in (silent, late):
        (name,) = worker.assigned
        for offset in range(3):
            await worker.add(name, offset, 1)
    late.beats(quiet_s=0.05)  # its engine makes tokens, and nothing of it arrives
    looks = cluster.coordinator.rounds._moves
    after = looks._next + 3.5
    await wait_until(lambda: looks._next >= after, what="more time than the watchdog allows")
    assert {listed(cluster, name).state for name in ("w1", "w2")} == {WorkerState.READY}
    (name,) = silent.assigned
    assert (await silent.add(name, 3, 1, STOP)).finished
    assert (await run.get()).counters["attempts"] == 2


async def test_a_worker_that_comes_and_goes_is_quarantined_for_a_while(cluster: Any) -> None:
    run = await cluster.run()
    await run.submit("a")
    for _ in range(2):
        unsteady = await cluster.worker("w1")
        await unsteady.has("a")
        await unsteady.break_streams()
        await wait_until(lambda: listed(cluster, "w1").state is WorkerState.LOST)
    unsteady = await cluster.worker("w1")
    shown = listed(cluster, "w1")
    assert shown.state is WorkerState.QUARANTINED
    assert 4 < shown.quarantined_s <= 5
    assert "lost too often" in (await run.get()).message
    steady = await cluster.worker("w2")
    await steady.has("a")
    assert unsteady.assigned == {}
    assert (await run.get()).message == ""


async def test_a_worker_whose_streams_are_replaced_is_not_quarantined(cluster: Any) -> None:
    run, worker = await cluster.run(), await cluster.worker("w1")
    await run.submit("a")
    await worker.has("a")
    held = [fleet_pb2.HeldAttempt(attempt=worker.assigned["a"].attempt)]
    for _ in range(4):
        again = await cluster.worker("w1", held=held)
        assert [ref.rollout_id for ref in again.attached.adopted] == ["a"]
    assert listed(cluster, "w1").quarantined_s == 0
    for _ in range(2):
        again = await cluster.worker("w1")  # another process, that has nothing
        await again.has("a")
    await cluster.worker("w1")
    assert listed(cluster, "w1").quarantined_s > 0


async def quarantined(cluster: Any, worker_id: str, **more: Any) -> Any:
    """A worker that was lost twice in a row, and is back."""
    for _ in range(2):
        unsteady = await cluster.worker(worker_id, **more)
        await unsteady.break_streams()
        await wait_until(lambda: listed(cluster, worker_id).state is WorkerState.LOST)
    return await cluster.worker(worker_id, **more)


async def test_a_worker_that_is_quarantined_pulls_weights_and_is_waited_for(cluster: Any, monkeypatch: Any) -> None:
    """Nobody else could take what it could."""
    monkeypatch.setattr(worker_health, "_SHORTEST_S", 2.5)
    monkeypatch.setattr(unserved_work, "_LONGER_GRACE_S", 0.2)
    run, small = await cluster.run(), await cluster.worker("w2")
    small.beats()
    engine = fleet_pb2.EngineInfo(model="m", vocab_size=1000, max_model_len=10_000)
    large = await quarantined(cluster, "w1", engine=engine)
    large.beats()
    await run.submit("a", prompt_ids=pack_ids([1] * 1000))
    await wait_until(lambda: large.installed, what="it pulls")
    assert listed(cluster, "w1").state is WorkerState.QUARANTINED
    await large.has("a")
    assert listed(cluster, "w1").quarantined_s == 0
    assert await run.count("dead_lettered") == 0


async def test_no_run_is_left_to_a_worker_that_is_quarantined(cluster_with: Any) -> None:
    async with cluster_with(timeslice_s=0.2) as cluster:
        steady, unsteady = await cluster.worker("w2", slots=1), await quarantined(cluster, "w1")
        cluster.coordinator.state.changes.learn("w2", 0.01)  # else turns are long, for changes might cost much
        for run_id in ("one", "two"):
            run = await cluster.run(run_id)
            await run.submit(*(f"{run_id}.{number}" for number in range(2000)))
        served: list[str] = []
        while len(set(served)) < 2:
            await wait_until(lambda: steady.assigned)
            ((name, assignment),) = steady.assigned.items()
            served.append(assignment.attempt.run_id)
            assert (await steady.add(name, 0, 1, STOP)).finished
            del steady.assigned[name]
        assert len(served) < 2000  # both had work all the while
        assert unsteady.assigned == {}
        assert listed(cluster, "w1").state is WorkerState.QUARANTINED


async def test_a_planned_leave_is_held_against_nobody(cluster: Any) -> None:
    await cluster.run()
    for _ in range(4):
        worker = await cluster.worker("w1")
        await worker.say(draining=fleet_pb2.Draining(deadline_s=5.0, reason="asked"))
        await wait_until(lambda: listed(cluster, "w1").state is WorkerState.DRAINING)
        await worker.break_streams()
        await wait_until(lambda: listed(cluster, "w1").state is WorkerState.LOST)
    await cluster.worker("w1")
    assert listed(cluster, "w1").quarantined_s == 0


async def test_a_poison_rollout_is_dead_lettered_alone(cluster: Any) -> None:
    run = await cluster.run()
    innocents = [f"i{number}" for number in range(12)]
    await run.submit("poison", *innocents)
    number, finished = 0, set[str]()
    workers: list[Any] = []

    async def over() -> bool:
        nonlocal number
        while len(workers) < 3:
            number += 1
            workers.append(await cluster.worker(f"w{number}", slots=4))
        for worker in list(workers):
            if "poison" in worker.assigned:  # it dies before any of its rollouts has a token
                workers.remove(worker)
                await worker.break_streams()
                continue
            for name in list(worker.assigned):
                await worker.add(name, 0, 2, STOP)
                finished.add(worker.assigned.pop(name).attempt.rollout_id)
        return bool(await run.count("finished") == 13)

    await wait_until(over, 30.0, what="all came to their end")
    assert finished == set(innocents)
    assert await run.count("dead_lettered") == 1
    (letter,) = await run.events("dead_letter", 1)
    assert letter.labels["rollout"] == "poison"
    assert letter.message.startswith("5 attempts in a row")
    assert await run.count("attempts") < 2 * 13 + 5


async def test_what_a_lost_worker_had_sent_is_stored_before_its_rollouts_go_elsewhere(cluster: Any) -> None:
    run, first = await cluster.run(), await cluster.worker("w1")
    await run.submit("a")
    await first.has("a")
    for offset in range(0, 10, 2):  # nobody waits for the answers
        await first._append.write(first.message(first.delta("a", offset, 2)))
    first._control.cancel()
    second = await cluster.worker("w2")
    await second.has("a")
    assert len(second.assigned["a"].partial) == 10 * 12


async def test_the_grace_of_a_restart_begins_when_workers_can_come(cluster_with: Any) -> None:
    async with cluster_with(recover_grace_s=0.4) as cluster:
        run, first = await cluster.run(), await cluster.worker("w1")
        await run.submit("a")
        await first.has("a")
        held = [fleet_pb2.HeldAttempt(attempt=first.assigned["a"].attempt)]
        await cluster.stop()
        stopped = time.monotonic()
        await cluster.start(serve_after_s=0.6)  # slow to come up
        again = await cluster.worker("w1", held=held)
        assert [ref.rollout_id for ref in again.attached.adopted] == ["a"]
        assert await run.count("attempts") == 1
        attempt = cluster.coordinator.state.runs["r"].running["a"]
        assert attempt.given > stopped  # else it would seem to have waited for a token ever since the machine's start


async def test_rollouts_go_back_in_line_once_the_grace_is_over(cluster_with: Any) -> None:
    async with cluster_with(recover_grace_s=0.2) as cluster:
        run, first = await cluster.run(), await cluster.worker("w1")
        await run.submit("a")
        await first.has("a")
        await cluster.restart()
        await wait_until(lambda: cluster.coordinator.state.runs["r"].queue, what="it is back in line")
        other = await cluster.worker("w2")
        await other.has("a")


async def test_a_worker_is_awaited_beyond_the_grace_while_others_still_come_back(cluster_with: Any) -> None:
    async with cluster_with(recover_grace_s=0.2) as cluster:
        run, names = await cluster.run(), ("w1", "w2", "w3")
        workers = [await cluster.worker(name, slots=1) for name in names]
        await run.submit("a", "b", "c")
        await wait_until(lambda: all(worker.assigned for worker in workers))
        held = [[fleet_pb2.HeldAttempt(attempt=one.attempt) for one in worker.assigned.values()] for worker in workers]
        await cluster.restart()
        await cluster.worker(names[0], slots=1, held=held[0])
        state = cluster.coordinator.state
        grace_over = state.clock() + 0.4
        await wait_until(lambda: state.clock() > grace_over, what="the end of the grace, beside some looks at orphans")
        second = await cluster.worker(names[1], slots=1, held=held[1])
        assert len(second.attached.adopted) == 1, "its rollout was not given to others meanwhile"
        (lost,) = workers[2].assigned
        await wait_until(lambda: lost in state.runs["r"].queue, what="the rollout of who does not come back")
        assert await run.count("attempts") == 3


async def test_nobody_is_silent_for_too_long_while_others_still_come_back(cluster_with: Any) -> None:
    async with cluster_with(heartbeat_timeout_s=0.3) as cluster:
        run, first = await cluster.run(), await cluster.worker("w1")
        await run.submit("a")
        await first.has("a")
        held = [fleet_pb2.HeldAttempt(attempt=first.assigned["a"].attempt)]
        await cluster.restart()
        again = await cluster.worker("w1", held=held)
        state = cluster.coordinator.state
        came = state.clock()
        await wait_until(lambda: not state.sessions, what="its silence noticed")
        assert state.clock() - came > 2.0, "not while others might come as late"
        assert again.attached.adopted
