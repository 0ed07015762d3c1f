"""What a relay follows: another relay, as its client sees it. Nothing is believed that was not checked."""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from ebbtide.errors import VersionUnavailable
from ebbtide.rpc.channel import open_channel
from ebbtide.rpc.convert import from_proto
from ebbtide.rpc.security import ClientSecurity
from ebbtide.rpc.status import translated
from ebbtide.transfer import GrpcSource, opener
from ebbtide.transfer.finding import Finder, Found, Question, is_usable
from ebbtide.transfer.pool import UNLISTED, OpenSource, Pool
from ebbtide.types.weights import FoundWay, Holder, Manifest, VersionInfo
from ebbtide.v1 import weights_pb2 as pb
from ebbtide.v1.weights_pb2_grpc import WeightsStub
from ebbtide.weight_relay.records import Stream
from ebbtide.weights import Limits, Way


class Upstream(Protocol):
    """What is asked of an upstream; see `RelayUpstream`."""

    target: str

    async def close(self) -> None: ...
    def pool(self) -> Pool: ...
    def watch(self) -> AsyncIterator[VersionInfo]: ...
    async def find(
        self, stream: Stream, version: int, have: Sequence[int], *, failed: Sequence[str] = (), scratch: bool = False
    ) -> Found: ...
    async def tell(self, stream: Stream, version: int) -> None: ...
    async def manifest(self, stream: Stream, version: int) -> Manifest: ...
    async def way(self, found: FoundWay, target: Manifest) -> Way: ...


class RelayUpstream:
    """Calls of the relay at `target`, made by `holder`. All raise the service's errors."""

    def __init__(self, target: str, security: ClientSecurity, holder: Holder, limits: Limits) -> None:
        self.target, self._holder, self._limits = target, holder, limits
        self._channel, self._open_source = open_channel(target, security), opener(security)
        self._stub = WeightsStub(self._channel)
        self._finder = Finder(self._stub, target, lambda: holder)

    async def close(self) -> None:
        await self._channel.close()

    def pool(self) -> Pool:
        """Sources of blobs, the upstream the last of them; to be closed by who asked."""
        itself = OpenSource(GrpcSource(self._stub, self.target, self._holder), "upstream", self.target, UNLISTED)
        return Pool(itself, self._open_source, self._holder)

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
    ) -> Found:
        """Ways to a version from those in `have`, and sources; the upstream hears that this relay wants it."""
        run_id, policy = stream
        return await self._finder.find(
            Question(
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
        question = Question(run_id=run_id, policy=policy, version=version, have=(version,), done=True)
        await self._finder.find(question)

    async def manifest(self, stream: Stream, version: int) -> Manifest:
        """The manifest of a version (0: the newest), checked but for its signature."""
        return await self._finder.manifest(*stream, version, limits=self._limits)

    async def way(self, found: FoundWay, target: Manifest) -> Way:
        """The manifests and patches of a way, checked but for their signatures."""
        return await self._finder.way(found, target)


def best_way(found: Found, have: Sequence[int]) -> FoundWay:
    """The cheapest way that can be gone. Raises `VersionUnavailable` if there is none."""
    for way in found.ways:
        if is_usable(way, have):
            return way
    raise VersionUnavailable("the upstream relay knows no way to the version")
