"""Who was frozen for too long is superseded: what it still sends when it wakes is refused, and it finds its place."""

import asyncio

from ebbtide.client import Client
from ebbtide.types.fleet import Worker, WorkerState
from tests.chaos.cluster import Cluster
from tests.chaos.load import Begin
from tests.support.waiting import wait_until


async def test_a_worker_that_wakes_finds_its_rollouts_gone_and_starts_afresh(cluster: Cluster, begin: Begin) -> None:
    load = await begin(heartbeat_timeout_s=2)
    client = cluster.client()
    await load.submit(64)
    load.watch_tokens(6)
    await load.more_tokens(64 * 8)
    cluster.freeze("w1")

    async def state() -> WorkerState:
        return (await listed(client, "w1")).state

    async def lost() -> bool:
        return await state() is WorkerState.SUSPECTED

    await wait_until(lost, what="the silent worker given up")
    await load.counted("resumed_midway", 8)
    cluster.thaw("w1")

    async def back() -> bool:
        return await state() is WorkerState.READY

    await wait_until(back, what="the worker back")
    await wait_until(lambda: len(cluster.logged("w1", "attached")) == 2, what="what it learnt")
    again = cluster.logged("w1", "attached")[1]
    assert (again["adopted"], again["superseded"] > 0) == (0, True)
    await load.submit(64)
    run = await load.settle()
    assert {record.rollout_id for record in cluster.ledger("w1")} & {f"x{number}" for number in range(64, 128)}
    assert load.interruptions() <= run.counters["attempts"] - 128
    assert len(load.resumed()) >= 8


async def test_a_worker_frozen_for_less_keeps_its_rollouts(cluster: Cluster, begin: Begin) -> None:
    load = await begin(heartbeat_timeout_s=30)
    client = cluster.client()
    await load.submit(64)
    load.watch_tokens(64)
    await wait_until(lambda: len(load.seen) == 64, what="all rollouts begun: one that only waits goes elsewhere")
    cluster.freeze("w1")

    async def silent() -> bool:
        return (await listed(client, "w1")).last_heartbeat_s > 1.0

    await wait_until(silent, what="a silence of two heartbeats")
    cluster.thaw("w1")
    run = await load.settle()
    assert run.counters["attempts"] == 64
    assert load.generated_twice() == 0


async def test_a_coordinator_that_wakes_after_another_took_over_writes_nothing_and_ends(
    cluster: Cluster, begin: Begin
) -> None:
    load = await begin(recover_grace_s=1)
    await load.submit(256)
    await load.more_tokens(64 * 8)
    cluster.freeze("coordinator")
    await cluster.coordinator("newer", recover_grace_s=1)
    await cluster.worker("w3", "newer", slots=64)
    newer = cluster.client("newer")

    async def moved() -> int:
        return (await newer.run("r")).counters.get("resumed_midway", 0)

    await wait_until(moved, what="rollouts resumed under the newer coordinator")
    cluster.thaw("coordinator")  # w1 and w2 had gone on sending to it
    await wait_until(lambda: not cluster.process["coordinator"].running(), what="the end of the older coordinator")
    assert cluster.process["coordinator"].returncode == 1
    (failed,) = cluster.logged("coordinator", "failed")
    assert "another coordinator has taken over this store" in failed["reason"]
    assert cluster.process["newer"].running()
    # Started again where it was, it is the newest: the other one has to go, and all workers come back to this one.
    await cluster.coordinator(recover_grace_s=5)
    await asyncio.gather(load.settle(), ended(cluster, "newer"))
    assert "another coordinator has taken over" in cluster.logged("newer", "failed")[0]["reason"]


async def ended(cluster: Cluster, name: str) -> None:
    await wait_until(lambda: not cluster.process[name].running(), timeout=20, what=f"the end of {name}")


async def listed(client: Client, worker_id: str) -> Worker:
    return next(worker for worker in await client.workers() if worker.worker_id == worker_id)
