"""A store that comes back knowing less than it acknowledged: what it forgot comes again, and nobody is told off."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from ebbtide.coordinator.service import Coordinator
from ebbtide.coordinator.settings import CoordinatorSettings
from ebbtide.errors import InvalidRequest, StoreUnavailable, Unavailable
from ebbtide.store.durability import _FSYNC_S, DurabilityPromise
from ebbtide.store.scripts import RUN_KEYS, run_key, run_prefix
from ebbtide.types.fleet import AppendStatus
from ebbtide.types.session import SessionEnd, SessionTurn
from ebbtide.v1 import runs_pb2, types_pb2
from tests.fakes.scripted_worker import tokens
from tests.integration.coordinator.gateways import OWNER, answer, asked, gateway, pass_time
from tests.support.redis_servers import EmbeddedRedis
from tests.support.waiting import wait_until

STOP = types_pb2.FINISH_REASON_STOP
STORED, GAP, SUPERSEDED = AppendStatus.STORED, AppendStatus.GAP, AppendStatus.SUPERSEDED


class Rig:
    """A coordinator that knows its store may forget; what is acknowledged behind `mark` is what it forgets."""

    def __init__(self, redis: EmbeddedRedis, cluster: Any) -> None:
        self.redis, self.cluster = redis, cluster
        self._mark = 0

    def promise(self, seconds: float) -> None:
        """Have the store say so at the next look, and take it as said now."""
        _FSYNC_S["always"] = seconds
        self.cluster.coordinator.link.durability.horizon.promise = DurabilityPromise(seconds, seconds)
        self.cluster.coordinator.state.incarnation.durable_after_s = seconds

    def mark(self) -> None:
        self._mark = self.redis.journal.stat().st_size
        self.promise(30.0)  # however long the test takes

    async def forget(self) -> None:
        """Come back with what was there at the mark; the coordinator has noticed."""
        state = self.cluster.coordinator.state
        life = state.incarnation
        _FSYNC_S["always"] = 0.2
        self.redis.come_back(knowing=self._mark)
        await wait_until(life.over.is_set, what="the coordinator noticing")

    async def again(self, worker: Any) -> None:
        """What a worker does whose append stream ended."""

        async def ended() -> bool:
            try:
                await worker.send()
            except Unavailable:
                return True
            return False

        await wait_until(ended, what="the end of the stream")
        await worker.open_append()


@pytest.fixture
async def rig(tmp_path: Path, cluster_with: Any, monkeypatch: Any) -> AsyncIterator[Rig]:
    monkeypatch.setitem(_FSYNC_S, "always", 0.2)  # so that the journal's length is exact
    monkeypatch.setattr("ebbtide.store.durability._SAMPLE_S", 0.1)
    with EmbeddedRedis(tmp_path / "redis") as redis:
        async with cluster_with(redis.url) as cluster:
            yield Rig(redis, cluster)


async def test_forgotten_placements_and_tokens_do_not_end_an_attempt(rig: Rig) -> None:
    run, worker = await rig.cluster.run(), await rig.cluster.worker("w1")
    await run.submit("begun")
    await worker.has("begun")
    await worker.add("begun", 0, 4)
    await run.submit("placed", priority=-1)
    rig.mark()
    await worker.has("placed")
    attempts = {name: given.attempt.attempt_id for name, given in worker.assigned.items()}
    await worker.add("begun", 4, 6)
    await worker.add("placed", 0, 3)
    await rig.forget()
    await rig.again(worker)
    gap = await worker.add("begun", 10, 1)
    assert (gap.status, gap.stored) == (GAP, 4)
    gap = await worker.add("placed", 3, 1)
    assert (gap.status, gap.stored) == (GAP, 0)
    assert (await worker.add("begun", 4, 7, STOP)).finished
    assert (await worker.add("placed", 0, 4, STOP)).finished
    assert not worker.cancelled
    assert {name: given.attempt.attempt_id for name, given in worker.assigned.items()} == attempts
    assert await run.count("attempts") == 2


async def test_a_move_that_the_store_forgot_stays_made(rig: Rig) -> None:
    run, first = await rig.cluster.run(), await rig.cluster.worker("w1")
    await run.submit("a")
    await first.has("a")
    await first.add("a", 0, 4)
    rig.mark()
    await first.break_streams()
    second = await rig.cluster.worker("w2")
    await second.has("a")
    assert second.assigned["a"].attempt.attempt_id != first.assigned["a"].attempt.attempt_id
    await second.add("a", 4, 3)
    await rig.forget()
    await rig.again(second)
    gap = await second.add("a", 7, 1)
    assert (gap.status, gap.stored) == (GAP, 4)
    assert (await second.add("a", 4, 4, STOP)).finished
    assert not second.cancelled


async def test_what_a_gateway_did_last_comes_again_with_its_turns_before_their_rollouts(rig: Rig) -> None:
    run, worker = await rig.cluster.run(), await rig.cluster.worker("w1")
    async with gateway(rig.cluster) as lease:
        await lease.open_session("before", OWNER)
        rig.mark()
        lease._journal.renewed(rig.cluster.coordinator.state.incarnation.name, 30.0, 0.0)  # it may forget from now on
        await lease.open_session("s", OWNER)
        await lease.add_turn("s", OWNER, SessionTurn(request_id="t1", rollout_ids=("a",), record=b"prompt"))
        await lease.submit_rollouts([asked("a")])
        await lease.end_session(SessionEnd(session_id="before", owner=OWNER, drop_reason="done"))
        await worker.has("a")
        await worker.add("a", 0, 3)
        await rig.forget()
        await rig.again(worker)
        found = await lease.read_turns("s", OWNER)  # unknown at first, and asked again until it is there
        assert [(one.request_id, one.record) for one in found.turns] == [("t1", b"prompt")]
        await wait_until(lambda: "a" not in rig.cluster.coordinator.state.runs["r"].unconfirmed)
        await rig.again(worker)
        assert (await worker.add("a", 0, 5, STOP)).finished
        assert (await answer(lease, "a"))[0] == tokens(0, 5)
        assert (await lease.read_turns("before", OWNER)).session.drop_reason == "done"
        await pass_time(rig.cluster, 3000)
        assert (await answer(lease, "a"))[0] == tokens(0, 5)  # its session keeps it
    assert not worker.cancelled
    assert await run.count("requests_submitted") == 1


async def test_what_was_numbered_in_a_forgotten_life_does_not_hide_what_comes_in_the_next(rig: Rig) -> None:
    run, worker = await rig.cluster.run(), await rig.cluster.worker("w1")
    await run.submit("a", "b")
    await worker.has("a", "b")
    rig.mark()
    await rig.forget()
    await rig.again(worker)  # reconciled: numbers are ahead of the clock from here on
    rig.mark()
    await rig.forget()
    await rig.again(worker)
    assert (await worker.add("a", 0, 4, STOP)).finished
    (first,) = await run.finished(1)
    await rig.forget()  # and with it how it was reconciled the last time
    await rig.again(worker)
    assert (await worker.add("b", 0, 4, STOP)).finished
    (second,) = await run.finished(1, first.cursor)
    assert second.rollout_id == "b"


async def test_what_a_clock_far_ahead_numbered_in_a_forgotten_life_does_not_hide_what_comes_next(rig: Rig) -> None:
    run, worker = await rig.cluster.run(), await rig.cluster.worker("w1")
    await run.submit("a", "b")
    await worker.has("a", "b")
    rig.mark()
    finished, ahead = run_key(run.run_id, "FINISHED"), f"{time.time_ns() // 1_000_000 + 86_400_000}-0"
    rig.redis.command("XADD", finished, ahead, "x", "")  # as if its clock had been put forward
    rig.redis.command("XDEL", finished, ahead)
    assert (await worker.add("a", 0, 4, STOP)).finished
    (first,) = await run.finished(1)
    assert first.cursor.split("-")[0] == ahead.removesuffix("-0")
    await rig.forget()
    await rig.again(worker)
    assert (await worker.add("b", 0, 4, STOP)).finished
    (second,) = await run.finished(1, first.cursor)
    assert second.rollout_id == "b"
    await run.complete("e.b", "b")
    (trajectory,) = await run.trajectories(1, first.cursor)
    assert trajectory.episode_id == "e.b"


async def test_a_cursor_behind_the_last_that_is_left_brings_nothing_again(rig: Rig) -> None:
    run, worker = await rig.cluster.run(), await rig.cluster.worker("w1")
    await run.submit("a", "b", "c")
    await worker.has("a", "b", "c")
    for name in ("a", "b"):
        assert (await worker.add(name, 0, 4, STOP)).finished
    _, second = await run.finished(2)
    await run.acknowledge("b")  # the stream ends before the cursor, but had numbered it
    watched = asyncio.create_task(run.finished(1, second.cursor))
    assert (await worker.add("c", 0, 4, STOP)).finished
    (third,) = await watched
    assert third.rollout_id == "c"


async def test_a_forgotten_rollout_goes_on_where_it_is_once_it_is_submitted_again(rig: Rig) -> None:
    run, worker = await rig.cluster.run(), await rig.cluster.worker("w1")
    rig.mark()
    await run.submit("lost")
    await worker.has("lost")
    attempt = worker.assigned["lost"].attempt.attempt_id
    await worker.add("lost", 0, 5)
    await rig.forget()
    await rig.again(worker)
    ack = await worker.add("lost", 5, 2)
    assert (ack.status, ack.stored) == (STORED, 0)  # kept waiting, not turned away
    with pytest.raises(StoreUnavailable, match="was never submitted"):
        await run.acknowledge("lost")
    assert await run.submit("lost") == [1]
    await rig.again(worker)
    assert (await worker.add("lost", 7, 0)).status is GAP
    assert (await worker.add("lost", 0, 7, STOP)).finished
    (finish,) = await run.finished(1)
    assert (finish.rollout_id, finish.attempts) == ("lost", 1)
    assert worker.assigned["lost"].attempt.attempt_id == attempt
    assert not worker.cancelled


async def test_a_forgotten_rollout_that_nobody_submits_again_is_ended_after_a_while(rig: Rig, monkeypatch: Any) -> None:
    monkeypatch.setattr("ebbtide.coordinator.run_recovery.DOUBT_S", 0.5)
    run, worker = await rig.cluster.run(), await rig.cluster.worker("w1")
    rig.mark()
    await run.submit("lost")
    await worker.has("lost")
    attempt = worker.delta("lost", 0, 1)
    await rig.forget()
    await wait_until(lambda: worker.cancelled == ["lost"], what="the end of the attempt")
    await rig.again(worker)
    (ack,) = await worker.send(attempt)
    assert ack.status is SUPERSEDED
    with pytest.raises(InvalidRequest, match="was never submitted"):
        await run.acknowledge("lost")


async def test_a_forgotten_finish_does_not_keep_an_episode_from_being_completed(rig: Rig) -> None:
    run, worker = await rig.cluster.run(), await rig.cluster.worker("w1")
    await run.submit("a", "b")
    await worker.has("a", "b")
    rig.mark()
    for name in ("a", "b"):
        assert (await worker.add(name, 0, 4, STOP)).finished
    seen = await run.finished(2)
    await rig.forget()
    await rig.again(worker)
    await wait_until(
        rig.cluster.coordinator.state.runs["r"].mirror.reconciled.is_set
    )  # else its worker would have to ask
    await run.complete("e.a", "a")  # the driver saw it
    await wait_until(lambda: worker.cancelled == ["a"])
    assert (await worker.add("b", 0, 4, STOP)).finished
    (finish,) = await run.finished(1, cursor=seen[-1].cursor)  # under a number that no watcher has passed
    assert finish.rollout_id == "b"
    await run.complete("e.b", "b")
    trajectories = await run.trajectories(2)
    await run.commit(*(one.cursor for one in trajectories))
    assert (await run.finish()).counters["trained"] == 2


async def test_a_trajectory_is_shown_once_it_cannot_be_forgotten(rig: Rig) -> None:
    run, worker = await rig.cluster.run(), await rig.cluster.worker("w1")
    await run.submit("a")
    await worker.has("a")
    await worker.add("a", 0, 4, STOP)
    store = rig.cluster.coordinator.store
    rig.mark()
    await run.complete("e.a", "a")
    assert await store.trajectories.page("r", "") == []
    await rig.forget()
    await run.complete("e.a", "a")
    assert [one.episode_id for one in await run.trajectories(1)] == ["e.a"]
    assert await run.count("trajectories") == 1


async def test_a_trajectory_from_the_future_of_the_stores_clock_is_shown(rig: Rig) -> None:
    """As after the clock was set back, or at a server whose clock is behind that of the one before."""
    run, worker = await rig.cluster.run(), await rig.cluster.worker("w1")
    await run.submit("a")
    await worker.has("a")
    await worker.add("a", 0, 4, STOP)
    rig.promise(30.0)
    await run.complete("e.a", "a")
    store, key = rig.cluster.coordinator.store, run_prefix("r") + RUN_KEYS["TRAJECTORIES"]
    assert await store.trajectories.page("r", "") == []
    ((cursor, fields),) = await store.link.call("XRANGE", key, "-", "+")
    said = dict(zip(fields[::2], fields[1::2], strict=True))
    said[b"at"] = b"%d" % (int(said[b"at"]) + 3_600_000)
    await store.link.call("XDEL", key, cursor)
    await store.link.call("XADD", key, "*", *(part for pair in said.items() for part in pair))
    assert [one.episode_id for one in await store.trajectories.page("r", "")] == ["e.a"]


async def test_finishes_become_durable_at_a_store_that_came_back_with_weaker_promises(rig: Rig) -> None:
    run, worker = await rig.cluster.run(), await rig.cluster.worker("w1")
    await run.submit("a")
    await worker.has("a")
    rig.promise(0.0)
    await worker.open_append()
    await worker.add("a", 0, 4)
    assert worker.durable
    rig.mark()
    rig.promise(0.0)
    await rig.forget()
    await wait_until(rig.cluster.coordinator.state.runs["r"].mirror.reconciled.is_set)
    await rig.again(worker)
    await worker.exchange(worker.message(worker.delta("a", 4, 1, STOP)))
    assert not worker.durable
    async with asyncio.timeout(5):
        assert (await worker._append.read()).durable


async def test_watchers_miss_no_event_after_others_that_they_saw_were_forgotten(rig: Rig) -> None:
    run = await rig.cluster.run()
    version = (await rig.cluster.call(rig.cluster.runs.ReserveVersion, run.lease)).version
    rig.mark()
    record = types_pb2.PolicyVersion(policy="policy", version=version, step=1, root=bytes(32))
    announce = runs_pb2.AnnounceVersionRequest(lease=run.lease, version=record)
    await rig.cluster.call(rig.cluster.runs.AnnounceVersion, announce)
    last = (await run.events("version", 2))[-1]
    await rig.forget()
    await rig.cluster.call(rig.cluster.runs.AnnounceVersion, announce)
    assert (await rig.cluster.call(rig.cluster.runs.ReserveVersion, run.lease)).version == version + 1
    stream = rig.cluster.runs.WatchRun(runs_pb2.WatchRunRequest(run_id="r", cursor=last.cursor))
    event = await stream.read()
    while event.kind != "version":
        event = await stream.read()
    stream.cancel()
    assert event.values["step"] == 1


async def test_a_lease_that_could_not_be_renewed_while_the_store_was_away_is_not_lost(rig: Rig) -> None:
    run = await rig.cluster.run()
    await rig.cluster.coordinator.store.leases.renew(lease_of(run), 0.05)
    rig.mark()
    await rig.forget()
    await wait_until(rig.cluster.coordinator.state.runs["r"].mirror.reconciled.is_set)
    held = await rig.cluster.coordinator.store.leases.held("r")
    assert held["trainer"].rest_s > 0.5


async def test_store_and_coordinator_come_back_together_and_the_workers_know_more(rig: Rig) -> None:
    run, worker = await rig.cluster.run(), await rig.cluster.worker("w1")
    await run.submit("queued")
    rig.mark()
    await worker.has("queued")
    await run.submit("lost")
    await worker.has("lost")
    held = [{"attempt": given.attempt, "offset": 3} for given in worker.assigned.values()]
    version = types_pb2.PolicyVersion(policy="policy", version=1, step=0, root=bytes([1]) * 32)
    await rig.cluster.stop()
    rig.promise(0.2)
    rig.redis.come_back(knowing=rig._mark)
    await rig.cluster.start()
    back = await rig.cluster.worker("w1", held=held, installed=[version])
    back.assigned.update(worker.assigned)
    assert {ref.rollout_id for ref in back.attached.adopted} == {"queued", "lost"}
    await run.submit("lost")
    for name in ("queued", "lost"):

        async def finished(name: str = name) -> bool:
            try:
                return bool((await back.add(name, 0, 3, STOP)).finished)
            except StoreUnavailable:
                await back.open_append()
                return False

        await wait_until(finished, what=f"{name} known again")
    assert not back.cancelled
    assert await run.count("attempts") == 2


def lease_of(run: Any) -> Any:
    from ebbtide.types.run import LeaseRef

    return LeaseRef(run_id="r", role=run.lease.role, fence=run.lease.fence)


async def test_a_store_that_would_come_back_empty_and_wipe_its_replica_is_refused(tmp_path: Path) -> None:
    primary = EmbeddedRedis(tmp_path / "a", tcp=True, options={"appendonly": "no"})
    with primary, EmbeddedRedis(tmp_path / "b", replica_of=primary) as replica:
        await wait_until(lambda: replica.info("master_link_status") == "up", what="the replica in step")
        coordinator = Coordinator(CoordinatorSettings(store_url=primary.url))
        try:
            with pytest.raises(StoreUnavailable, match="would be empty and wipe them; turn on appendonly"):
                await coordinator.open()
        finally:
            await coordinator.close()
