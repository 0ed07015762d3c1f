"""A worker that is asked to end hands over all that it has: not one token is generated twice."""

import asyncio
import time

from ebbtide.types.fleet import WorkerState
from tests.chaos.cluster import Cluster
from tests.chaos.load import Begin
from tests.support.waiting import wait_until


async def test_sigterm_hands_every_token_over_and_ends_at_once(cluster: Cluster, begin: Begin) -> None:
    load = await begin()
    await load.submit(64)
    load.watch_tokens(6)
    await load.more_tokens(64 * 16)
    began = time.monotonic()
    await cluster.process["w1"].stop()
    assert cluster.process["w1"].returncode == 0
    assert time.monotonic() - began < 5
    (drained,) = cluster.logged("w1", "drained")
    assert drained["tokens"] == sum(record.generated for record in cluster.ledger("w1"))
    run = await load.settle()
    assert load.generated_twice() == 0
    assert 16 <= load.interruptions() == run.counters["attempts"] - 64
    assert len(load.resumed(least=8)) >= 16


async def test_a_fleet_replaced_worker_by_worker_generates_nothing_twice(cluster: Cluster, begin: Begin) -> None:
    load = await begin()
    await load.submit(160)
    for old, new in (("w1", "w3"), ("w2", "w4"), ("w3", "w5")):
        await load.more_tokens(300)
        await asyncio.gather(cluster.process[old].stop(), cluster.worker(new))
        assert cluster.process[old].returncode == 0
    await load.settle()
    assert load.resumed(least=8)
    assert load.generated_twice() == 0
    left = {worker.worker_id for worker in await cluster.client().workers() if worker.state is WorkerState.LOST}
    assert left == {"w1", "w2", "w3"}


async def test_a_worker_that_ends_while_the_coordinator_is_away_hands_over_to_the_next_one(
    cluster: Cluster, begin: Begin
) -> None:
    load = await begin()
    await load.submit(64)
    await load.more_tokens(64 * 8)
    cluster.kill("coordinator")
    leaving = asyncio.create_task(cluster.process["w1"].stop())
    await wait_until(lambda: cluster.logged("w1", "asked to end"), what="the signal taken")
    await cluster.coordinator()
    await leaving
    assert cluster.process["w1"].returncode == 0
    await load.settle()
    assert load.interruptions() >= 16
    assert load.generated_twice() == 0
