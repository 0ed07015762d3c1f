"""Whoever has to do with a version of 24 tiles dies when so many of them have passed: all or nothing, no mixture."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest
from msgspec.structs import replace

from ebbtide.client import Client, Lease
from ebbtide.free_ports import free_port
from ebbtide.types.weights import PolicyVersion
from tests.chaos.cluster import SCRIPT, TOKEN, Cluster
from tests.chaos.load import RUN, SPEC
from tests.chaos.versions import TILE, TILES, Weights
from tests.fakes.links import Direction, Way
from tests.support.waiting import wait_until

FAST: Final = (1, 12, 23)
ALL: Final = tuple(range(TILES + 1))
#: What a patch of a step takes, about: bf16 elements, one in 32 of which changes.
_PATCH: Final = TILES * 14_000


class Fleet:
    """A cluster whose engines log what they install, and the versions published on it so far."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.step = 0
        self.published: dict[int, str] = {}  # version -> digest
        self.options: dict[str, dict[str, Any]] = {}

    async def boot(self) -> None:
        self.cluster.routed = True
        self.cluster.script = replace(SCRIPT, digests=True)
        await self.cluster.boot(workers=0)
        self.client: Client = self.cluster.client()
        await self.client.submit(SPEC, RUN)

    async def worker(self, name: str, **options: str) -> None:
        self.options[name] = {"mirror_dir": str(self.cluster.directory / f"mirrors-{name}"), **options}
        await self.again(name)

    async def again(self, name: str) -> None:
        await self.cluster.worker(name, **self.options[name])

    async def publish(self, lease: Lease) -> PolicyVersion:
        weights = Weights(self.step)
        version = await lease.publish(weights.tensors(), step=self.step)
        self.published[version.version] = weights.digest
        self.step += 1
        return version

    def share(self, boundary: int) -> int:
        """Bytes of a version, about, when so many of its tiles have passed."""
        size = _PATCH if self.step % 2 else TILES * TILE
        return max(1, size * boundary // TILES)

    async def has(self, name: str, version: PolicyVersion) -> None:
        await wait_until(
            lambda: any(number == version.version for _, number in self.cluster.installed(name)),
            timeout=60,
            interval=0.05,
            what=f"version {version.version} on {name}",
        )

    def check(self, *names: str) -> None:
        """Nothing but whole versions was ever read by these workers' engines."""
        for name in names:
            for entry in self.cluster.logged(name, "weights read"):
                assert entry["digest"] == self.published[entry["version"]], (name, entry["version"])


@pytest.fixture
async def fleet(cluster: Cluster) -> Fleet:
    fleet = Fleet(cluster)
    await fleet.boot()
    return fleet


@pytest.fixture
async def lease(fleet: Fleet) -> AsyncIterator[Lease]:
    async with fleet.client.claim(RUN, holder="test") as lease:
        yield lease


async def stopped(direction: Direction, arrived: "asyncio.Future[Any]") -> None:
    """A version is held up on its way, or it has passed whole."""
    await wait_until(lambda: direction.silent or arrived.done(), timeout=60, what="a version under way")


async def kill_at(
    fleet: Fleet, lease: Lease, direction: Direction, victim: str, boundary: int, reader: str
) -> PolicyVersion:
    """Publish, and kill `victim` when so much of the version has passed; it stays dead, and its way silent."""
    direction.limit = direction.passed + fleet.share(boundary)
    if victim in {reader, "relay"}:
        version = await fleet.publish(lease)
    else:
        version = await publish_to_first(fleet, lease, victim, reader)
    arrived = asyncio.create_task(fleet.has(reader, version))
    try:
        await stopped(direction, arrived)
        fleet.cluster.kill(victim)
    finally:
        arrived.cancel()
    if direction.held:
        direction.release()
    direction.limit = float("inf")
    return version


async def publish_to_first(fleet: Fleet, lease: Lease, source: str, reader: str) -> PolicyVersion:
    """Publish a version of which `reader` hears only once `source` has begun to fetch it."""
    news, fetched = fleet.cluster.ways[reader, "coordinator"].back, fleet.cluster.ways[source, "relay"].back
    news.hold()
    try:
        before = fetched.passed
        version = await fleet.publish(lease)
        await wait_until(lambda: fetched.passed > before + TILE // 16, timeout=30, what="the source's fetch")
    finally:
        news.release()
    return version


async def worker_dies(fleet: Fleet, lease: Lease, boundaries: tuple[int, ...]) -> None:
    await fleet.worker("w1")
    await fleet.has("w1", await fleet.publish(lease))
    for boundary in boundaries:
        way = fleet.cluster.ways["w1", "relay"].back
        version = await kill_at(fleet, lease, way, "w1", boundary, "w1")
        await fleet.again("w1")
        await fleet.has("w1", version)
        fleet.check("w1")


async def relay_dies(fleet: Fleet, lease: Lease, boundaries: tuple[int, ...]) -> None:
    await fleet.worker("w1")
    await fleet.has("w1", await fleet.publish(lease))
    for boundary in boundaries:
        way = fleet.cluster.ways["w1", "relay"].back
        version = await kill_at(fleet, lease, way, "relay", boundary, "w1")
        await fleet.cluster.relay()
        await fleet.has("w1", version)
        fleet.check("w1")


async def peer_dies(fleet: Fleet, lease: Lease, boundaries: tuple[int, ...]) -> None:
    """w2 reads from a worker of its site, a new one each time; the relay is of another site."""
    version = await fleet.publish(lease)
    await fleet.worker("w2", site="far")
    for boundary in boundaries:
        peer, port = f"peer-{boundary}", free_port()
        way = await Way.open(f"127.0.0.1:{port}")
        fleet.cluster.ways["w2", peer] = way
        await fleet.worker(peer, site="far", peer_listen=f"127.0.0.1:{port}", peer_advertise=way.address)
        await asyncio.gather(fleet.has(peer, version), fleet.has("w2", version))
        before = way.back.passed
        version = await kill_at(fleet, lease, way.back, peer, boundary, "w2")
        await fleet.has("w2", version)
        assert way.back.passed > before, "w2 did not read from its peer"
        fleet.check(peer, "w2")


async def trainer_dies(fleet: Fleet, boundaries: tuple[int, ...]) -> None:
    await fleet.worker("w1")
    relay = await fleet.cluster.route("publisher", "relay")
    way = fleet.cluster.ways["publisher", "relay"].forth
    await published(fleet, relay)
    for boundary in boundaries:
        held = len(fleet.cluster.installed("w1"))
        way.limit = way.passed + fleet.share(boundary)
        trainer = await publisher(fleet, relay)
        ended = asyncio.create_task(trainer.wait())
        await stopped(way, ended)
        whole = ended.done()
        if not whole:
            trainer.kill()
        await ended
        if way.held:
            way.release()
        way.limit = float("inf")
        if not whole:
            assert len(fleet.cluster.installed("w1")) == held
            await published(fleet, relay)
        fleet.step += 1


async def publisher(fleet: Fleet, relay: str) -> asyncio.subprocess.Process:
    coordinator = fleet.cluster.process["coordinator"].address
    root = str(Path(__file__).parents[2])
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.chaos.publisher", coordinator, relay, str(fleet.step)),
        env={**os.environ, "EBBTIDE_TOKEN": TOKEN, "PYTHONPATH": root},
    )


async def published(fleet: Fleet, relay: str) -> None:
    """A trainer that nobody disturbs publishes the step, and w1 has it."""
    before = len(fleet.cluster.logged("w1", "weights read"))
    trainer = await publisher(fleet, relay)
    assert await trainer.wait() == 0
    await wait_until(lambda: len(fleet.cluster.logged("w1", "weights read")) > before, timeout=60, what="its version")
    assert fleet.cluster.logged("w1", "weights read")[-1]["digest"] == Weights(fleet.step).digest


async def test_a_worker_that_dies_amid_a_version_finds_what_its_mirror_kept(fleet: Fleet, lease: Lease) -> None:
    await worker_dies(fleet, lease, FAST)


async def test_a_version_is_whole_or_not_there_whenever_the_relay_dies(fleet: Fleet, lease: Lease) -> None:
    await relay_dies(fleet, lease, FAST)


async def test_a_peer_that_dies_is_replaced_as_a_source(fleet: Fleet, lease: Lease) -> None:
    await peer_dies(fleet, lease, FAST)


async def test_a_trainer_that_dies_amid_a_publish_leaves_no_version(fleet: Fleet) -> None:
    await trainer_dies(fleet, FAST)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", ["worker", "relay", "peer"])
async def test_every_boundary(fleet: Fleet, lease: Lease, victim: str) -> None:
    await {"worker": worker_dies, "relay": relay_dies, "peer": peer_dies}[victim](fleet, lease, ALL)


@pytest.mark.nightly
@pytest.mark.timeout(600)
async def test_every_boundary_of_a_publish(fleet: Fleet) -> None:
    await trainer_dies(fleet, ALL)
