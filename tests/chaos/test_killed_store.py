"""Redis dies under load and comes back with its append-only file: what was acknowledged is there, or comes again."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Self

import pytest
import uvloop

from ebbtide.client import Client
from ebbtide.errors import StoreUnavailable
from ebbtide.store.connection import StoreConnection
from ebbtide.types.rollout import Episode, RolloutRequest, Trajectory, TrajectoryOutcome
from ebbtide.types.run import RunEvent, RunStatus
from tests.chaos.cluster import FLUSH_TOKENS, TOKEN, Cluster
from tests.chaos.load import RUN, SPEC, Begin, Load
from tests.support.redis_servers import EmbeddedRedis
from tests.support.waiting import wait_until


async def test_nothing_acknowledged_is_lost_when_the_store_is_killed_under_load(cluster: Cluster, begin: Begin) -> None:
    load = await begin()
    for _ in range(2):
        await load.submit(64)
        load.watch_tokens(8, first=len(load.requests) - 64)
        enough = asyncio.Event()
        submitting = asyncio.create_task(keep_submitting(load, enough))
        await load.more_tokens(500)
        stored = (await load.run()).counters["tokens_stored"]
        cluster.redis.kill()
        # Not 64 more from now on: where appends lag, as on a busy machine, flush windows are all but full already.
        await wait_until(lambda: cluster.generated() >= stored + 64, what="tokens while the store is away")  # noqa: B023
        assert not submitting.done()
        cluster.redis.start()
        await load.more_tokens(300)
        enough.set()
        await submitting
    await load.all_finished()
    await cluster.process["w1"].stop()
    assert cluster.process["w1"].returncode == 0, "finishes that were in flight have left it"
    run = await load.settle()
    assert run.counters["attempts"] - run.counters.get("moved", 0) == len(load.requests)
    assert load.generated_twice() == 0


async def test_what_a_store_forgets_comes_again_from_workers_and_lease_holders(cluster: Cluster, begin: Begin) -> None:
    cluster.redis = EmbeddedRedis(cluster.directory / "redis", fsync="everysec")
    load = await begin()
    load.forgetful = True
    await load.submit(64)
    load.watch_tokens(8)
    with Lengths(cluster.redis) as lengths:
        for step in (1, 2):
            enough = asyncio.Event()
            submitting = asyncio.create_task(keep_submitting(load, enough))
            await load.more_tokens(1000)
            await load.publish(step=step)
            knowing = lengths.ago(1.5)
            assert cluster.redis.journal.stat().st_size - knowing > 20_000
            cluster.redis.come_back(knowing=knowing)
            await load.more_tokens(300)
            enough.set()
            await submitting
    run = await load.settle()
    assert run.counters["attempts"] - run.counters.get("moved", 0) == len(load.requests)
    assert load.generated_twice() == 0
    events = [event async for event in cluster.client().watch(RUN)]
    assert {event.values["version"] for event in events if event.kind == "version"} == {1, 2, 3}


async def test_ends_that_a_store_forgets_are_made_again(cluster: Cluster, begin: Begin) -> None:
    cluster.redis = EmbeddedRedis(cluster.directory / "redis", fsync="everysec")
    load = await begin()
    await load.submit(30)
    await load.all_finished()
    names = list(load.requests)
    with Lengths(cluster.redis) as lengths:
        await wait_until(lambda: lengths.ago(0.5))
        await load.lease.acknowledge(names[:10])
        await load.lease.complete_episodes(episode(load.requests[name]) for name in names[10:20])
        await load.lease.cancel_rollouts(names[20:])
        cluster.redis.come_back(knowing=lengths.ago(0.5))
    assert (await load.run()).counters.get("dropped", 0) in {0, 10}
    await load.counted("dropped", 10)
    await load.counted("trained", 10)
    trajectories = [one async for one in first(load.lease.trajectories(), 10)]
    assert [one.episode_id for one in trajectories] == [load.requests[name].episode_id for name in names[10:20]]
    knowing = cluster.redis.journal.stat().st_size
    await load.lease.commit(TrajectoryOutcome(cursor=one.cursor) for one in trajectories)
    cluster.redis.come_back(knowing=knowing)
    await load.counted("trained", 20)
    ended = await load.lease.finish()
    assert (ended.counters["trained"], ended.dropped) == (20, {"cancelled": 10})


async def test_a_full_store_holds_generation_back_and_loses_nothing(cluster: Cluster, begin: Begin) -> None:
    load = await begin()
    await load.submit(64)
    load.watch_tokens(8)
    await load.more_tokens(500)
    cluster.redis.command("CONFIG", "SET", "maxmemory", "100kb")
    await quiet(cluster, 1.5)
    held = cluster.generated() - (await load.run()).counters["tokens_stored"]
    assert 0 < held <= 64 * FLUSH_TOKENS
    impatient = Client(cluster.process["coordinator"].address, token=TOKEN, patience_s=0.5)
    with pytest.raises(StoreUnavailable, match="is full"):
        await impatient.submit(SPEC, "another")
    await impatient.close()
    assert not load.lease.lost.is_set()
    cluster.redis.command("CONFIG", "SET", "maxmemory", "0")
    run = await load.settle()
    assert run.counters["attempts"] - run.counters.get("moved", 0) == 64
    assert load.generated_twice() == 0


async def test_a_slow_store_holds_nothing_up_but_itself(cluster: Cluster, begin: Begin) -> None:
    load = await begin()
    await load.submit(64)
    await load.more_tokens(500)
    slowing = asyncio.create_task(slow_down(cluster.redis))
    await generates_on(cluster, 1500)
    await load.more_tokens(1000)
    slowing.cancel()
    run = await load.settle()
    assert run.counters["attempts"] - run.counters.get("moved", 0) == 64
    assert load.generated_twice() == 0


async def test_events_versions_and_ends_survive_the_store_and_its_coordinator(cluster: Cluster, begin: Begin) -> None:
    load = await begin()
    await load.submit(40)
    await load.counted("finished", 8)
    await load.lease.report([RunEvent(kind="note", key="before")])
    second = await load.publish(step=1)
    cluster.redis.kill()
    cluster.kill("coordinator")
    cluster.redis.start()
    await cluster.coordinator()
    third = await load.publish(step=2)
    assert (second.version, third.version) == (2, 3)
    run = await load.settle()
    assert run.status is RunStatus.FINISHED
    assert run.counters["attempts"] == 40
    assert load.generated_twice() == 0
    events = [event async for event in cluster.client().watch(RUN)]
    assert [event.values["version"] for event in events if event.kind == "version"] == [1, 2, 3]
    assert [event.key for event in events if event.kind == "note"] == ["before"]


def test_the_connection_comes_back_however_often_the_store_dies_under_it(tmp_path: Path) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as in the coordinator
        runner.run(kill_under_writes(tmp_path))


async def kill_under_writes(directory: Path) -> None:
    """Every acknowledged write, and at most one more of each writer, is there in the end."""
    with EmbeddedRedis(directory) as redis:
        link, acknowledged = StoreConnection(redis.url, patience_s=20.0), [0] * 40

        async def write(number: int) -> None:
            while True:
                with suppress(StoreUnavailable):  # it came back
                    await link.call("HSET", f"k{number}", acknowledged[number], bytes(2000))
                    acknowledged[number] += 1

        await link.open()
        writers = [asyncio.create_task(write(number)) for number in range(40)]
        for _ in range(20):
            least = sum(acknowledged) + 200
            await wait_until(lambda least=least: sum(acknowledged) >= least, what="writes")  # type: ignore[misc]
            life = link.incarnation
            redis.kill()
            redis.start()
            await wait_until(lambda life=life: link.incarnation != life, what="the link to the next life")  # type: ignore[misc]
        assert not any(writer.done() for writer in writers)
        for writer in writers:
            writer.cancel()
        await asyncio.gather(*writers, return_exceptions=True)
        for number, count in enumerate(acknowledged):
            assert await link.call("HLEN", f"k{number}") - count in {0, 1}
        await link.close()


class Lengths:
    """How long the store's journal was when, for as long as it is used with `with`."""

    def __init__(self, redis: EmbeddedRedis) -> None:
        self._redis = redis
        self._seen: list[tuple[float, int]] = []

    def ago(self, seconds: float) -> int:
        """Its length that many seconds ago; 0 if that is not known."""
        when = time.monotonic() - seconds
        return max((length for seen, length in self._seen if seen <= when), default=0)

    async def _look(self) -> None:
        while True:
            self._seen.append((time.monotonic(), self._redis.journal.stat().st_size))
            await asyncio.sleep(0.02)

    def __enter__(self) -> Self:
        self._task = asyncio.create_task(self._look())
        return self

    def __exit__(self, *_: object) -> None:
        self._task.cancel()


def episode(request: RolloutRequest) -> Episode:
    """A made-up end of the rollout's episode."""
    end = Trajectory(
        episode_id=request.episode_id,
        group_id=request.group_id,
        step=1,
        group_size=1,
        prompt_ids=request.prompt_ids,
        tokens=bytes(24),
        loss_mask=bytes(2),
        reward=1.0,
    )
    return Episode(episode_id=request.episode_id, rollout_ids=(request.rollout_id,), trajectory=end)


async def first(stream: AsyncGenerator[Trajectory, None], count: int) -> AsyncIterator[Trajectory]:
    async with aclosing(stream):
        for _ in range(count):
            yield await anext(stream)


async def keep_submitting(load: Load, enough: asyncio.Event) -> None:
    """Small calls one after the other, so that one of them meets the store's death."""
    while not enough.is_set():
        await load.submit(1)
        await asyncio.sleep(0.02)


async def slow_down(redis: EmbeddedRedis) -> None:
    """Let it run for a tenth of its time."""
    try:
        while True:
            redis.freeze()
            await asyncio.sleep(0.18)
            redis.thaw()
            await asyncio.sleep(0.02)
    finally:
        redis.thaw()


async def quiet(cluster: Cluster, seconds: float) -> None:
    """Wait until nothing was generated for so long."""
    made, since = -1, time.monotonic()

    def still() -> bool:
        nonlocal made, since
        if (now := cluster.generated()) != made:
            made, since = now, time.monotonic()
        return time.monotonic() - since > seconds

    await wait_until(still, 30, interval=0.1, what="workers that wait")


async def generates_on(cluster: Cluster, count: int) -> None:
    """Wait until so many tokens more were generated, stored or not."""
    least = cluster.generated() + count
    await wait_until(lambda: cluster.generated() >= least, what="tokens while the store is away")
