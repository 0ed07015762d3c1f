"""Calls the relay that this relay follows, and checks every answer."""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from ebbtide.auth.security import ClientSecurity
from ebbtide.errors import VersionUnavailable
from ebbtide.rpc.channel import open_channel
from ebbtide.rpc.status_table import translated
from ebbtide.scheduling.distribution.retained_bytes import Stream
from ebbtide.transfer import GrpcSource, opener
from ebbtide.transfer.sources import UNLISTED, OpenSource, SourcePool
from ebbtide.transfer.version_finder import FoundVersion, VersionFinder, WayLists, WayRequest, is_usable
from ebbtide.types.weights import FoundWay, Holder, Manifest, VersionInfo
from ebbtide.v1 import weights_pb2 as pb
from ebbtide.v1.weights_pb2_grpc import WeightsStub
from ebbtide.weights import ManifestLimits
from ebbtide.wire.record_conversion import from_proto


class Upstream(Protocol):
    """A relay or a static copy that is followed. All calls raise the service's errors."""

    target: str

    async def close(self) -> None: ...

    def pool(self) -> SourcePool:
        """Sources of blobs, the upstream the last of them. The caller closes the pool."""
        ...

    def watch(self) -> AsyncIterator[VersionInfo]:
        """Yield the versions that the upstream holds, of all runs, then each new one."""
        ...

    async def find(self, request: WayRequest) -> FoundVersion:
        """Ways and sources. The upstream hears that this relay wants the version, or has it (`done`)."""
        ...

    async def manifest(self, stream: Stream, version: int) -> Manifest:
        """The manifest of a version (0: the newest), checked but for its signature."""
        ...

    async def way(self, found: FoundWay, target: Manifest) -> WayLists:
        """The manifests and patches of a way, checked but for their signatures."""
        ...


class RelayUpstream:
    """The relay at `target`, called by `holder`; an `Upstream`."""

    def __init__(self, target: str, security: ClientSecurity, holder: Holder, limits: ManifestLimits) -> None:
        self.target, self._holder, self._limits = target, holder, limits
        self._channel, self._open_source = open_channel(target, security), opener(security)
        self._stub = WeightsStub(self._channel)
        self._finder = VersionFinder(self._stub, target, lambda: holder)

    async def close(self) -> None:
        await self._channel.close()

    def pool(self) -> SourcePool:
        itself = OpenSource(GrpcSource(self._stub, self.target, self._holder), "upstream", self.target, UNLISTED)
        return SourcePool(itself, self._open_source, self._holder)

    async def watch(self) -> AsyncIterator[VersionInfo]:
        call = self._stub.WatchVersions(pb.WatchVersionsRequest())
        try:
            with translated("upstream relay", self.target):
                async for message in call:
                    yield from_proto(message, VersionInfo)
        finally:
            call.cancel()

    async def find(self, request: WayRequest) -> FoundVersion:
        return await self._finder.find(request)

    async def manifest(self, stream: Stream, version: int) -> Manifest:
        return await self._finder.manifest(*stream, version, limits=self._limits)

    async def way(self, found: FoundWay, target: Manifest) -> WayLists:
        return await self._finder.way(found, target)


def best_way(found: FoundVersion, have: Sequence[int]) -> FoundWay:
    """The cheapest usable way. Raises `VersionUnavailable` if there is none."""
    for way in found.ways:
        if is_usable(way, have):
            return way
    raise VersionUnavailable("the upstream relay knows no way to the version")
