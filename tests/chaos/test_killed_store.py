"""Redis dies under load and comes back with its append-only file: what was acknowledged is there."""

import asyncio
from pathlib import Path

import uvloop

from ebbtide.store.connection import Connection
from ebbtide.testing import EmbeddedRedis, wait_until
from ebbtide.types.run import RunEvent, RunStatus
from tests.chaos.cluster import Cluster
from tests.chaos.load import RUN, Begin, Load


async def test_nothing_acknowledged_is_lost_when_the_store_is_killed_under_load(cluster: Cluster, begin: Begin) -> None:
    load = await begin()
    await load.submit(64)
    load.watch_tokens(8)
    for _ in range(2):
        enough = asyncio.Event()
        submitting = asyncio.create_task(keep_submitting(load, enough))
        await load.more_tokens(500)
        cluster.redis.kill()
        await generates_on(cluster, 300)
        assert not submitting.done()
        cluster.redis.start()
        await load.more_tokens(300)
        enough.set()
        await submitting
    run = await load.settle()
    assert run.counters["attempts"] == len(load.requests)
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
        link, acknowledged = Connection(redis.url, patience_s=20.0), [0] * 40

        async def write(number: int) -> None:
            while True:
                await link.call("HSET", f"k{number}", acknowledged[number], bytes(2000))
                acknowledged[number] += 1

        await link.open()
        writers = [asyncio.create_task(write(number)) for number in range(40)]
        for _ in range(20):
            least = sum(acknowledged) + 200
            await wait_until(lambda least=least: sum(acknowledged) >= least, what="writes")  # type: ignore[misc]
            redis.kill()
            redis.start()
        assert not any(writer.done() for writer in writers)
        for writer in writers:
            writer.cancel()
        await asyncio.gather(*writers, return_exceptions=True)
        for number, count in enumerate(acknowledged):
            assert await link.call("HLEN", f"k{number}") - count in {0, 1}
        await link.close()


async def keep_submitting(load: Load, enough: asyncio.Event) -> None:
    """Small calls one after the other, so that one of them meets the store's death."""
    while not enough.is_set():
        await load.submit(1)
        await asyncio.sleep(0.02)


async def generates_on(cluster: Cluster, count: int) -> None:
    """Wait until so many tokens more were generated, stored or not."""
    least = cluster.generated() + count
    await wait_until(lambda: cluster.generated() >= least, what="tokens while the store is away")
