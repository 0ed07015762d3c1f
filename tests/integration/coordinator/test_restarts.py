"""What dies may die at any moment: nothing acknowledged is lost, and who was superseded can write nothing."""

import asyncio
from typing import Any

import grpc
import pytest

from ebbtide.errors import Draining, StoreUnavailable, Unavailable
from ebbtide.store.durability import _FSYNC_S
from ebbtide.v1 import fleet_pb2, rollouts_pb2, types_pb2
from ebbtide.v1.fleet_pb2 import AppendAck
from tests.support.redis_servers import EmbeddedRedis
from tests.support.waiting import wait_until

STOP = types_pb2.FINISH_REASON_STOP


def held(worker: Any, *rollout_ids: Any) -> Any:
    """What a worker says that it still has when it attaches again."""
    return [fleet_pb2.HeldAttempt(attempt=worker.assigned[r].attempt, offset=0) for r in rollout_ids]


def installed(version: Any = 1) -> Any:
    return [types_pb2.PolicyVersion(policy="policy", version=version, step=0, root=bytes([version]) * 32)]


@pytest.fixture
def own_redis(tmp_path: Any) -> Any:
    with EmbeddedRedis(tmp_path / "redis") as server:
        yield server


async def test_a_restarted_coordinator_adopts_live_attempts_and_requeues_the_rest(cluster: Any) -> None:
    run = await cluster.run()
    worker = await cluster.worker("w1", slots=2)
    await run.submit("a", "b")
    await worker.has("a", "b")
    gone = await cluster.worker("w2", slots=1)
    await run.submit("c", "d")
    await gone.has("c")
    for rollout_id, holder in (("a", worker), ("b", worker), ("c", gone)):
        await holder.add(rollout_id, 0, 5)
    await cluster.restart()
    back = await cluster.worker("w1", slots=4, held=held(worker, "a", "b"), installed=installed())
    assert {ref.rollout_id for ref in back.attached.adopted} == {"a", "b"}
    assert not back.attached.superseded
    back.assigned.update(worker.assigned)
    assert (await back.add("a", 5, 3)).stored == 8
    await back.has("c")  # w2 did not come back within the grace
    assert back.assigned["c"].partial == gone.delta("c", 0, 5).tokens
    for rollout_id, offset in (("a", 8), ("b", 5), ("c", 5)):
        assert (await back.add(rollout_id, offset, 2, STOP)).finished
    await back.has("d")
    assert (await back.add("d", 0, 2, STOP)).finished
    assert {one.rollout_id: len(one.tokens) // 12 for one in await run.finished(4)} == {"a": 10, "b": 7, "c": 7, "d": 2}
    record = await run.get()
    assert {name: record.counters[name] for name in ("submitted", "finished", "attempts")} == {
        "submitted": 4, "finished": 4, "attempts": 5,
    }  # fmt: skip


async def test_streams_resume_from_their_cursors_after_a_restart(cluster: Any) -> None:
    run = await cluster.run()
    worker = await cluster.worker("w1")
    await run.submit("a", "b")
    await worker.has("a", "b")
    await worker.send(worker.delta("a", 0, 2, STOP), worker.delta("b", 0, 2, STOP))
    first = await run.finished(1)
    await run.complete("e.a", "a")
    (trajectory,) = await run.trajectories(1)
    await cluster.restart()
    assert [one.rollout_id for one in await run.finished(1, cursor=first[0].cursor)] == ["b"]
    assert await run.trajectories(1) == [trajectory]
    await run.complete("e.b", "b")
    assert [one.episode_id for one in await run.trajectories(1, cursor=trajectory.cursor)] == ["e.b"]


async def test_a_worker_that_comes_back_to_a_restarted_coordinator_is_told_what_to_install(cluster: Any) -> None:
    run = await cluster.run()
    worker = await cluster.worker("w1")
    await run.submit("a")
    await worker.has("a")
    await cluster.restart()
    back = await cluster.worker("w1", held=held(worker, "a"), installed=installed())
    await wait_until(lambda: back.installed == [1])


async def test_an_attempt_given_to_another_worker_is_not_adopted(cluster: Any) -> None:
    run = await cluster.run()
    first = await cluster.worker("w1", slots=1)
    await run.submit("a")
    await first.has("a")
    await first.break_streams()
    second = await cluster.worker("w2")
    await second.has("a")
    back = await cluster.worker("w1", held=held(first, "a"))
    assert [ref.rollout_id for ref in back.attached.superseded] == ["a"]
    assert (await second.add("a", 0, 1)).stored == 1


async def test_a_worker_that_attaches_again_keeps_its_attempts(cluster: Any) -> None:
    run = await cluster.run()
    first = await cluster.worker("w1")
    await run.submit("a", "b")
    await first.has("a", "b")
    again = await cluster.worker("w1", held=held(first, "a"), installed=installed())
    assert [ref.rollout_id for ref in again.attached.adopted] == ["a"]
    await again.has("b")  # it no longer had this one
    again.assigned["a"] = first.assigned["a"]
    assert (await again.add("a", 0, 3)).stored == 3
    await wait_until(lambda: first.ended is not None)


async def test_an_old_coordinator_can_write_nothing_and_ends(cluster: Any, cluster_with: Any) -> None:
    run = await cluster.run()
    worker = await cluster.worker("w1")
    await run.submit("a")
    await worker.has("a")
    async with cluster_with() as newer:  # as if the first had been frozen meanwhile
        for call in (run.submit("b"), run.claim(), run.cancel("a"), worker.add("a", 0, 4)):
            with pytest.raises((Unavailable, Draining)):
                await call
        await wait_until(cluster.coordinator.link.superseded.is_set)
        run.cluster = newer
        record = await run.get()
        assert (record.counters["submitted"], record.counters.get("tokens_stored", 0)) == (1, 0)
        other = await newer.worker("w1", held=held(worker, "a"), installed=installed())
        assert [ref.rollout_id for ref in other.attached.adopted] == ["a"]


async def test_a_store_restart_loses_nothing_acknowledged_and_holds_up_appends_alone(
    cluster_with: Any, own_redis: Any
) -> None:
    async with cluster_with(own_redis.url) as cluster:
        run = await cluster.run()
        worker = await cluster.worker("w1", slots=2)
        await run.submit("a", "b", "c")
        await worker.has("a", "b")
        assert (await worker.add("a", 0, 8)).stored == 8
        own_redis.kill()
        appending = asyncio.create_task(worker.add("a", 8, 4))
        with pytest.raises(StoreUnavailable, match="store at"):
            await run.submit("d")
        await worker.say(heartbeat=fleet_pb2.Heartbeat(tokens_per_s=5.0))
        listed = fleet_pb2.ListWorkersRequest()
        fleet = worker._fleet

        async def heard() -> bool:
            (one,) = (await fleet.ListWorkers(listed, timeout=5)).workers
            return bool(one.tokens_per_s == 5.0)

        await wait_until(heard)
        assert not appending.done()
        own_redis.start()
        ack = await appending
        assert (ack.status, ack.stored) == (AppendAck.STATUS_STORED, 12)
        await worker.open_append()
        assert await run.submit("d") == [1]
        assert (await worker.add("a", 12, 1, STOP)).finished
        await worker.has("c")
        (done,) = await run.finished(1)
        assert len(done.tokens) == 13 * 12
        record = await run.get()
        assert {name: record.counters[name] for name in ("submitted", "queued", "running", "finished")} == {
            "submitted": 4, "queued": 1, "running": 2, "finished": 1,
        }  # fmt: skip


async def test_a_finish_in_flight_across_a_store_restart_is_called_durable_in_the_end(
    cluster_with: Any, own_redis: Any
) -> None:
    async with cluster_with(own_redis.url) as cluster:
        run = await cluster.run()
        worker = await cluster.worker("w1")
        await run.submit("a")
        await worker.has("a")
        own_redis.kill()
        finishing = asyncio.create_task(worker.add("a", 0, 4, STOP))
        await wait_until(
            lambda: any(session.append_stream.storing for session in cluster.coordinator.state.sessions.values())
        )
        own_redis.start()
        assert (await finishing).finished
        assert not worker.durable, "the answer began before the restart"
        async with asyncio.timeout(10):
            with pytest.raises(grpc.aio.AioRpcError, match="send again what is not durable"):
                await worker._append.read()
        await worker.open_append()
        assert (await worker.add("a", 0, 4, STOP)).finished
        assert worker.durable


async def test_a_full_store_pushes_back_and_deletions_make_room(cluster_with: Any, own_redis: Any) -> None:
    async with cluster_with(own_redis.url) as cluster:
        run = await cluster.run()
        worker = await cluster.worker("w1", slots=2)
        await run.submit("a", "b", "c")
        await worker.has("a", "b")
        assert (await worker.add("b", 0, 4, STOP)).finished
        own_redis.command("CONFIG", "SET", "maxmemory", "1")
        with pytest.raises(StoreUnavailable, match="full"):
            await run.submit("d")
        appending = asyncio.create_task(worker.add("a", 0, 8))
        await run.complete("e.b", "b")  # its deletions come first, so it may go on
        assert await run.count("trajectories") == 1
        assert not appending.done()
        own_redis.command("CONFIG", "SET", "maxmemory", "0")
        assert (await appending).stored == 8


async def test_what_a_lost_answer_left_behind_is_found_again(cluster: Any, redis_server: Any) -> None:
    run = await cluster.run()
    worker = await cluster.worker("w1", slots=1)
    await run.submit("first")
    await worker.has("first")
    redis_server.freeze()
    try:
        with pytest.raises(StoreUnavailable):
            await run.submit("a")  # it is in the store's socket, and will be taken when the store wakes
    finally:
        redis_server.thaw()
    await worker.add("first", 0, 1, STOP)
    await worker.has("a")
    assert await run.submit("a") == [2]


async def test_a_slow_watcher_holds_up_nobody(cluster: Any) -> None:
    run = await cluster.run()
    worker = await cluster.worker("w1", slots=256)
    request = rollouts_pb2.WatchFinishedRequest(run_id="r")
    slow = cluster.rollouts.WatchFinished(request)
    names = [f"x{number}" for number in range(300)]
    await run.submit(*names)
    for start in range(0, 300, 50):
        batch = names[start : start + 50]
        await worker.has(*batch)
        await worker.send(*(worker.delta(name, 0, 64, STOP) for name in batch))
    assert len(await run.finished(300)) == 300
    first = await slow.read()
    assert first.rollout_id == "x0"
    slow.cancel()


async def test_under_everysec_an_answer_is_called_durable_only_once_it_is(
    cluster_with: Any, own_redis: Any, monkeypatch: Any
) -> None:
    monkeypatch.setitem(_FSYNC_S, "everysec", 0.2)
    own_redis.command("CONFIG", "SET", "appendfsync", "everysec")
    async with cluster_with(own_redis.url) as cluster:
        run = await cluster.run()
        worker = await cluster.worker("w1")
        await run.submit("a")
        await worker.has("a")
        request = worker.message(worker.delta("a", 0, 4, STOP))
        await worker._append.write(request)
        answers: list[Any] = []
        while len(answers) < 2:
            answers += [one for one in [await worker._append.read()] if one.sequence == request.sequence]
        assert [(one.durable, list(one.others)) for one in answers] == [(False, []), (True, [])]


async def test_appends_are_no_longer_called_durable_at_once_when_the_store_stops_to_sync_each(
    cluster_with: Any, own_redis: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("ebbtide.store.durability._UNSYNCED_S", 0.2)
    async with cluster_with(own_redis.url) as cluster:
        run, worker = await cluster.run(), await cluster.worker("w1")
        await run.submit("a")
        await worker.has("a")
        await worker.add("a", 0, 4)
        assert worker.durable
        own_redis.command("CONFIG", "SET", "no-appendfsync-on-rewrite", "yes")
        async with asyncio.timeout(5):
            with pytest.raises(grpc.aio.AioRpcError, match="send again what is not durable"):
                await worker._append.read()
        await worker.open_append()
        await worker.exchange(worker.message(worker.delta("a", 4, 1, STOP)))
        assert not worker.durable
        async with asyncio.timeout(5):
            assert (await worker._append.read()).durable


async def test_a_store_that_refuses_at_once_is_not_asked_all_the_time(
    cluster_with: Any, own_redis: Any, monkeypatch: Any
) -> None:
    monkeypatch.setitem(_FSYNC_S, "everysec", 0.1)
    own_redis.command("CONFIG", "SET", "appendfsync", "everysec")
    async with cluster_with(own_redis.url) as cluster:
        run, worker = await cluster.run(), await cluster.worker("w1")
        await run.submit("a")
        await worker.has("a")
        monkeypatch.setitem(_FSYNC_S, "everysec", 1.0)
        await wait_until(lambda: cluster.coordinator.link.durable_after_s == 1.0)
        await worker._append.write(worker.message(worker.delta("a", 0, 4, STOP)))
        assert not (await worker._append.read()).durable
        own_redis.command("CONFIG", "SET", "dbfilename", "missing")
        own_redis.command("CONFIG", "SET", "save", "3600 1")
        own_redis.directory.joinpath("missing").mkdir()
        own_redis.command("BGSAVE")  # fails, and from then on writes are refused, and PING
        await wait_until(lambda: own_redis.command("PING").startswith(b"-MISCONF"))
        before = int(own_redis.info("total_commands_processed"))
        async with asyncio.timeout(5):
            assert (await worker._append.read()).durable
        assert int(own_redis.info("total_commands_processed")) - before < 100


async def test_a_worker_that_has_another_version_than_thought_is_told_to_install_again(cluster: Any) -> None:
    run = await cluster.run()
    worker = await cluster.worker("w1")
    await run.submit("a")
    await worker.has("a")
    refused = worker.assigned.pop("a").attempt
    await worker.say(
        released=fleet_pb2.Released(attempts=[refused], reason="none is", cause=types_pb2.END_CAUSE_WRONG_VERSION)
    )
    await worker.has("a")
    assert worker.installed == [1, 1]
    assert worker.assigned["a"].attempt.attempt_id != refused.attempt_id


async def test_a_rollout_that_the_store_has_under_another_attempt_does_not_stay_out_of_line(cluster: Any) -> None:
    run = await cluster.run()
    await run.submit("a")
    await cluster.coordinator.store.rollouts.place("r", [("a", "an-attempt-of-nobody", "w0")])
    worker = await cluster.worker("w1")
    await worker.has("a")  # once the attempt's worker did not show up within the grace
    assert (await worker.add("a", 0, 2, STOP)).finished


async def test_what_ended_is_remembered_only_while_the_mirror_is_read(cluster: Any, monkeypatch: Any) -> None:
    run = await cluster.run()
    worker = await cluster.worker("w1")
    await run.submit("a", "b")
    await worker.has("a", "b")
    live = cluster.coordinator.state.runs["r"]
    await worker.add("a", 0, 1, STOP)
    assert live.mirror._ended_lately is None
    versions = cluster.coordinator.store.runs.versions
    held: list[Any] = []

    async def meanwhile(run_id: str) -> Any:
        await worker.add("b", 0, 1, STOP)
        held.append(live.mirror._ended_lately)
        return await versions(run_id)

    monkeypatch.setattr(cluster.coordinator.store.runs, "versions", meanwhile)
    live.mirror.mark_stale()
    await wait_until(lambda: held and live.mirror._ended_lately is None)
    assert held == [{"b"}]
    assert not live.running
    assert not live.queue
