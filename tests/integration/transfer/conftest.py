"""Weights services that do as they are told, on real sockets: they break, stall, lie and forget."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np
import pytest

from ebbtide.auth.security import ClientSecurity, ServerSettings
from ebbtide.errors import Unavailable, VersionUnavailable
from ebbtide.rpc.channel import open_channel
from ebbtide.rpc.server import Server
from ebbtide.transfer import BlobCache, Puller, opener
from ebbtide.types.weights import TILE_BYTES, BlobSource, FetchPath, Holder, Manifest, Patch
from ebbtide.v1 import weights_pb2 as pb
from ebbtide.v1.weights_pb2_grpc import WeightsServicer, WeightsStub, add_WeightsServicer_to_server
from ebbtide.weights import (
    Planner,
    TileTask,
    Way,
    blob_sizes,
    named_tensor,
    places,
    split_manifest,
    split_patch,
)
from ebbtide.wire import to_proto
from tests.unit.weights.chain import Link, chain, link

SECURITY = ClientSecurity(token="a-token-of-tests")


class Script(WeightsServicer):
    """Serves a chain of versions. `ways` and `sources` are what FindWay answers; every call is kept.

    `mangle` may change or drop each tile on its way out, or raise; `gate` holds tiles back from the given count on.
    """

    def __init__(self, links: Sequence[Link]) -> None:
        self.links = {link.manifest.version.version: link for link in links}
        self.blobs = {digest: blob for link in links for digest, blob in link.blobs.items()}
        self.ways: list[FetchPath] = []
        self.scratch_paths: list[FetchPath] = []
        self.sources: list[BlobSource] = []
        self.asked: list[pb.FindWayRequest] = []
        self.fetched: list[bytes] = []
        self.sent = 0
        self.mangle: Callable[[bytes, bytes], Any] = lambda digest, data: (digest, data)
        self.patch: Callable[[Patch], Patch] = lambda patch: patch
        self.gate_after: int | None = None
        self.gate = asyncio.Event()
        self.again_s = 30.0

    async def FindWay(self, request: pb.FindWayRequest, context: Any) -> pb.FindWayResponse:
        self.asked.append(request)
        if request.version not in self.links:
            raise VersionUnavailable("not here")
        ways = [*self.ways, *(self.scratch_paths if request.scratch else [])]
        found = [to_proto(way, pb.Way) for way in ways if (way.via or (way.start,))[-1] == request.version]
        sources = [to_proto(source, pb.BlobSource) for source in self.sources if source.address not in request.failed]
        return pb.FindWayResponse(ways=found, sources=sources, again_s=self.again_s)

    async def GetManifest(self, request: pb.VersionRef, context: Any) -> AsyncIterator[pb.ManifestPart]:
        for part in split_manifest(self.links[request.version or max(self.links)].manifest, 1000):
            yield to_proto(part, pb.ManifestPart)

    async def GetPatch(self, request: pb.PatchRef, context: Any) -> AsyncIterator[pb.PatchPart]:
        found = self.links[request.version].patch
        if found is None or found.base.version != request.base:
            raise VersionUnavailable("no such patch")
        for part in split_patch(self.patch(found), 1000):
            yield to_proto(part, pb.PatchPart)

    async def FetchTiles(self, request: pb.FetchTilesRequest, context: Any) -> AsyncIterator[pb.Tile]:
        for digest in request.digests:
            self.fetched.append(digest)
            if self.gate_after is not None and self.sent >= self.gate_after:
                await self.gate.wait()
            if digest not in self.blobs:
                raise VersionUnavailable("no such blob")
            if (made := self.mangle(digest, self.blobs[digest])) is None:
                continue
            self.sent += 1
            yield pb.Tile(digest=made[0], data=made[1])


class Service:
    """A script on a socket."""

    def __init__(self, script: Script) -> None:
        self.script, self.address = script, "127.0.0.1:0"
        self._server: Server | None = None

    async def start(self) -> "Service":
        settings = ServerSettings(listen=self.address, token=SECURITY.token)
        self._server = Server(settings, [(add_WeightsServicer_to_server, self.script, "ebbtide.v1.Weights")])
        await self._server.start()
        self.address = self._server.address
        return self

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0.0)
            self._server = None

    def source(self, name: str, *, site: str = "", host: str = "") -> BlobSource:
        return BlobSource(name=name, address=self.address, site=site, host=host)


def breaking(after: int) -> Callable[[bytes, bytes], Any]:
    """A source that breaks once it has sent `after` tiles, and each time again."""
    left = after

    def mangle(digest: bytes, data: bytes) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise Unavailable("broken off")
        return digest, data

    return mangle


@pytest.fixture(scope="session")
def links() -> list[Link]:
    return chain(5, seed=2)


@pytest.fixture(scope="session")
def big() -> list[Link]:
    """Two versions of 24 tiles of 1 MiB, of which 1 % change."""
    rng = np.random.default_rng(1)
    bits = {f"layer.{at}": rng.integers(0, 1 << 16, 2 << 20, dtype="u2") for at in range(6)}
    changed = {name: data + (rng.random(len(data)) < 0.01).astype("u2") for name, data in bits.items()}
    first, second = (
        tuple(named_tensor(*item, dtype="BF16") for item in version.items()) for version in (bits, changed)
    )
    one = link(1, first, None, TILE_BYTES)
    return [one, link(2, second, one, TILE_BYTES)]


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[Sequence[Link]], Any]]:
    """Starts services; they end with the test."""
    services: list[Service] = []

    async def start(links: Sequence[Link]) -> Service:
        script = Script(links)  # type: ignore[abstract]  # what no test calls is UNIMPLEMENTED
        services.append(await Service(script).start())
        return services[-1]

    yield start
    for service in services:
        service.script.gate.set()
        await service.stop()


@pytest.fixture
async def pullers() -> AsyncIterator[Callable[..., Puller]]:
    """Pullers of a service; their channels end with the test."""
    opened: list[tuple[Any, Puller]] = []

    def make(service: Service, cache: BlobCache | None = None, *, site: str = "here", **options: Any) -> Puller:
        channel = open_channel(service.address, SECURITY)
        puller = Puller(
            WeightsStub(channel),
            service.address,
            holder=lambda: Holder(name="reader", site=site, host="host"),
            open_source=opener(SECURITY),
            cache=cache,
            **{"patience_s": 10.0, "silence_s": 2.0, **options},
        )
        opened.append((channel, puller))
        return puller

    yield make
    for channel, puller in opened:
        puller.close()
        await channel.close()


def needed(links: Sequence[Link], way: FetchPath) -> int:
    """Bytes that a way costs one who has what it starts from, or nothing if it is a keyframe."""
    by_number = {link.manifest.version.version: link for link in links}
    patches = tuple(patch for number in way.via if (patch := by_number[number].patch) is not None)
    target = by_number[(way.via or (way.start,))[-1]].manifest
    held = {} if way.keyframe else {place: digest_at(by_number[way.start].manifest, place) for place in places(target)}
    tasks = Planner(target, [Way(by_number[way.start].manifest, patches, way.keyframe)]).tasks(places(target), held)
    wanted = {digest for task in tasks if isinstance(task, TileTask) for digest in task.blobs}
    sizes = {digest: len(blob) for link in links for digest, blob in link.blobs.items()}
    assert all(sizes[digest] == size for patch in patches for digest, size in blob_sizes(patch).items())
    return sum(sizes[digest] for digest in wanted)


def digest_at(manifest: Manifest, place: tuple[int, int]) -> bytes:
    return manifest.tensors[place[0]].digests[place[1]]
