"""The weight-relay dies in the midst of a pull or a publish: versions arrive whole, and none is taken for another."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np

from ebbtide.testing import wait_until
from ebbtide.weights import as_array
from tests.chaos.cluster import Cluster
from tests.chaos.load import RUN, Begin

#: float32 elements of a version of 24 tiles.
LARGE = 6 << 20
#: Bytes after which the way is closed: some tiles have come whole by then, and one in part.
PART = (9 << 20) + 1000


class Way:
    """A way to the relay, which closes after `limit` bytes and opens again on demand."""

    def __init__(self, target: str) -> None:
        self._host, _, self._port = target.rpartition(":")
        self.passed, self.limit = 0, math.inf
        self._opened = asyncio.Event()
        self.address = ""

    @property
    def closed(self) -> bool:
        return self.passed >= self.limit

    def open(self) -> None:
        self.limit = math.inf
        self._opened.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            back, forth = await asyncio.open_connection(self._host, int(self._port))
        except OSError:  # the relay is down: so is the way
            writer.close()
            return
        try:
            await asyncio.gather(self._carry(reader, forth), self._carry(back, writer))
        except OSError:
            pass  # one end is gone
        finally:
            writer.close()
            forth.close()

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            self.passed += len(data)
            if self.closed:
                await self._opened.wait()
            sink.write(data)
            await sink.drain()
        sink.close()


@asynccontextmanager
async def way_to(target: str) -> AsyncIterator[Way]:
    way = Way(target)
    server = await asyncio.start_server(way.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    way.address = f"{host}:{port}"
    try:
        yield way
    finally:
        server.close()


async def test_a_worker_whose_relay_dies_during_the_pull_installs_the_version_whole(
    cluster: Cluster, begin: Begin
) -> None:
    load = await begin(workers=0)
    async with way_to(cluster.process["relay"].address) as way:
        await cluster.worker("w1", relay=way.address)
        await load.submit(24, version=1)
        await load.counted("tokens_stored", 100)
        way.limit = way.passed + PART
        await load.publish(step=1, elements=LARGE)
        await load.submit(24, version=2)
        await load.counted("finished", 24)
        await wait_until(lambda: way.closed, what="the pull under way")
        cluster.kill("relay")
        assert await installed(cluster) == [1]
        await cluster.relay()
        way.open()
        run = await load.settle()
        assert await installed(cluster) == [2]
    assert run.counters["attempts"] == 48
    assert load.generated_twice() == 0


async def test_a_publish_cut_by_the_relays_death_arrives_whole(cluster: Cluster, begin: Begin) -> None:
    await begin(workers=1)
    async with way_to(cluster.process["relay"].address) as way:
        trainer = cluster.client(relay=way.address)
        async with trainer.claim(RUN, holder="test") as lease:  # in the place of the load's own
            way.limit = way.passed + PART
            weights = np.random.default_rng(7).random(LARGE, dtype=np.float32)
            publishing = asyncio.create_task(lease.publish({"w": weights}, step=1))
            await wait_until(lambda: way.closed, what="the publish under way")
            cluster.kill("relay")
            assert not publishing.done()
            assert await installed(cluster) == [1]
            await cluster.relay()
            way.open()
            version = await publishing

            async def there() -> bool:
                return await installed(cluster) == [version.version]

            await wait_until(there, timeout=20, what="the version on the worker")
            manifest, tensors = await trainer.fetch_weights(RUN)
            assert manifest.version == version
            assert np.array_equal(as_array(tensors["w"]), weights)


async def installed(cluster: Cluster) -> list[int]:
    (worker,) = await cluster.client().workers()
    return [version.version for version in worker.installed]
