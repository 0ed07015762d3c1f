"""What a relay follows: another relay, as its client sees it. Nothing is believed that was not checked."""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from ebbtide.auth.security import ClientSecurity
from ebbtide.errors import VersionUnavailable
from ebbtide.rpc.channel import open_channel
from ebbtide.rpc.status_table import translated
from ebbtide.transfer import GrpcSource, opener
from ebbtide.transfer.sources.source_pool import UNLISTED, OpenSource, SourcePool
from ebbtide.transfer.version_finder import FoundVersion, VersionFinder, VersionQuestion, is_usable
from ebbtide.types.weights import FoundWay, Holder, Manifest, VersionInfo
from ebbtide.v1 import weights_pb2 as pb
from ebbtide.v1.weights_pb2_grpc import WeightsStub
from ebbtide.weight_relay.library.version_records import Stream
from ebbtide.weights import ManifestLimits, Way
from ebbtide.wire.record_conversion import from_proto


class Upstream(Protocol):
    """What is asked of an upstream; see `RelayUpstream`."""

    target: str

    async def close(self) -> None: ...
    def pool(self) -> SourcePool: ...
    def watch(self) -> AsyncIterator[VersionInfo]: ...
    async def find(
        self, stream: Stream, version: int, have: Sequence[int], *, failed: Sequence[str] = (), scratch: bool = False
    ) -> FoundVersion: ...
    async def tell(self, stream: Stream, version: int) -> None: ...
    async def manifest(self, stream: Stream, version: int) -> Manifest: ...
    async def way(self, found: FoundWay, target: Manifest) -> Way: ...


class RelayUpstream:
    """Calls of the relay at `target`, made by `holder`. All raise the service's errors."""

    def __init__(self, target: str, security: ClientSecurity, holder: Holder, limits: ManifestLimits) -> None:
        self.target, self._holder, self._limits = target, holder, limits
        self._channel, self._open_source = open_channel(target, security), opener(security)
        self._stub = WeightsStub(self._channel)
        self._finder = VersionFinder(self._stub, target, lambda: holder)

    async def close(self) -> None:
        await self._channel.close()

    def pool(self) -> SourcePool:
        """Sources of blobs, the upstream the last of them; to be closed by who asked."""
        itself = OpenSource(GrpcSource(self._stub, self.target, self._holder), "upstream", self.target, UNLISTED)
        return SourcePool(itself, self._open_source, self._holder)

    async def watch(self) -> AsyncIterator[VersionInfo]:
        """The versions of all runs that the upstream holds, then each new one."""
        call = self._stub.WatchVersions(pb.WatchVersionsRequest())
        try:
            with translated("upstream relay", self.target):
                async for message in call:
                    yield from_proto(message, VersionInfo)
        finally:
            call.cancel()

    async def find(
        self, stream: Stream, version: int, have: Sequence[int], *, failed: Sequence[str] = (), scratch: bool = False
    ) -> FoundVersion:
        """Ways to a version from those in `have`, and sources; the upstream hears that this relay wants it."""
        run_id, policy = stream
        return await self._finder.find(
            VersionQuestion(
                run_id=run_id,
                policy=policy,
                version=version,
                have=tuple(have),
                failed=tuple(failed),
                scratch=scratch,
            )
        )

    async def tell(self, stream: Stream, version: int) -> None:
        """This relay has a version whole."""
        run_id, policy = stream
        question = VersionQuestion(run_id=run_id, policy=policy, version=version, have=(version,), done=True)
        await self._finder.find(question)

    async def manifest(self, stream: Stream, version: int) -> Manifest:
        """The manifest of a version (0: the newest), checked but for its signature."""
        return await self._finder.manifest(*stream, version, limits=self._limits)

    async def way(self, found: FoundWay, target: Manifest) -> Way:
        """The manifests and patches of a way, checked but for their signatures."""
        return await self._finder.way(found, target)


def best_way(found: FoundVersion, have: Sequence[int]) -> FoundWay:
    """The cheapest way that can be gone. Raises `VersionUnavailable` if there is none."""
    for way in found.ways:
        if is_usable(way, have):
            return way
    raise VersionUnavailable("the upstream relay knows no way to the version")
