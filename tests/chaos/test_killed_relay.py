"""The weight-relay dies in the middle of a pull or a publish: versions arrive whole, and none is taken for another."""

import asyncio

import numpy as np

from ebbtide.weights import as_array
from tests.chaos.cluster import Cluster
from tests.chaos.load import RUN, Begin
from tests.chaos.phases import PART
from tests.chaos.trainer import LARGE
from tests.support.waiting import wait_until


async def test_a_worker_whose_relay_dies_during_the_pull_installs_the_version_whole(
    cluster: Cluster, begin: Begin
) -> None:
    cluster.routed = True
    load = await begin(workers=1)
    pulling = cluster.ways["w1", "relay"].back
    await load.submit(24, version=1)
    await load.counted("tokens_stored", 100)
    pulling.limit = pulling.passed + PART
    await load.publish(step=1, elements=LARGE)
    await load.submit(24, version=2)
    await load.counted("finished", 24)
    await wait_until(lambda: pulling.silent, what="the pull under way")
    cluster.kill("relay")
    assert await installed(cluster) == [1]
    await cluster.relay()
    pulling.release()
    await has(cluster, 2)
    run = await load.settle()
    assert run.counters["attempts"] == 48
    assert load.generated_twice() == 0


async def test_a_publish_cut_by_the_relays_death_arrives_whole(cluster: Cluster, begin: Begin) -> None:
    await begin(workers=1)
    await has(cluster, 1)
    cluster.routed = True
    trainer = cluster.client(relay=await cluster.route("trainer", "relay"))
    publishing_way = cluster.ways["trainer", "relay"].forth
    async with trainer.claim(RUN, holder="test") as lease:  # in the place of the load's own
        publishing_way.limit = PART
        weights = np.random.default_rng(7).random(LARGE, dtype=np.float32)
        publishing = asyncio.create_task(lease.publish({"w": weights}, step=1))
        await wait_until(lambda: publishing_way.silent, what="the publish under way")
        cluster.kill("relay")
        assert not publishing.done()
        assert await installed(cluster) == [1]
        await cluster.relay()
        publishing_way.release()
        version = await publishing
        await has(cluster, version.version)
        manifest, tensors = await trainer.fetch_weights(RUN)
        assert manifest.version == version
        assert np.array_equal(as_array(tensors["w"]), weights)


async def has(cluster: Cluster, version: int) -> None:
    """Wait until the worker has just that version."""

    async def there() -> bool:
        return await installed(cluster) == [version]

    await wait_until(there, timeout=20, what=f"version {version} on the worker")


async def installed(cluster: Cluster) -> list[int]:
    (worker,) = await cluster.client().workers()
    return [version.version for version in worker.installed]
