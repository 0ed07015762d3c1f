"""Pulls a version into a mirror with the fewest bytes, from any source, and verifies every blob.

Invariant: between pulls a `Puller` keeps only manifests, channels' states and the latest rates. A pull that ends in any
way, the process's death included, leaves in the mirror what it did; the next one goes on from there.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from ebbtide.errors import ChunkCorrupt, InvalidRequest, NoCapacity, Unavailable
from ebbtide.rpc.backoff import pauses, retrying
from ebbtide.transfer.blob_fetcher import FetchMeans
from ebbtide.transfer.mirror.digest_threads import DigestThreads
from ebbtide.transfer.mirror.element_changes import ElementChanges
from ebbtide.transfer.mirror.mirror import Mirror
from ebbtide.transfer.mirror_sink import FetchOrder
from ebbtide.transfer.pull import Pull
from ebbtide.transfer.sources.blob_cache import BlobCache
from ebbtide.transfer.sources.source_pool import UNLISTED, OpenSource
from ebbtide.transfer.sources.tile_source import GrpcSource, Opener
from ebbtide.transfer.version_finder import VersionFinder, WayRequest
from ebbtide.types.weights import FoundWay, Holder, Manifest, PolicyVersion
from ebbtide.v1.weights_pb2_grpc import WeightsStub
from ebbtide.weights import ManifestLimits, Place, same_geometry

#: Errors that may pass: the relay is away or full, or a source sent wrong blobs.
_PASSING: Final = (Unavailable, ChunkCorrupt, NoCapacity)


class Pulled(Struct, frozen=True, kw_only=True):
    """The cost of a pull."""

    bytes_by_source: dict[str, int]
    seconds: float
    tiles: int  # made
    reused: int  # tiles that were the version's already
    digests_s: float  # of the threads' time
    ways: tuple[FoundWay, ...]  # that were used, the latest last

    @property
    def bytes(self) -> int:
        return sum(self.bytes_by_source.values())


class Puller:
    """Pulls versions that one relay knows, from it and from the sources that it names."""

    def __init__(
        self,
        relay: WeightsStub,
        target: str,
        *,
        holder: Callable[[], Holder],
        patience_s: float,
        open_source: Opener,
        cache: BlobCache | None = None,
        streams: int = 3,
        silence_s: float = 5.0,
        threads: DigestThreads | None = None,
    ) -> None:
        """`target`: the relay's address, for errors. `holder` returns this reader as it is now. `patience_s`: for how
        long a pull goes on without progress. `open_source`: see `tile_source.opener`. `cache` gets the verified blobs.
        `streams`, `silence_s`: see `FetchMeans`. `threads` do digests and patches, and end with the puller."""
        self._relay, self._target, self._holder = relay, target, holder
        self._patience_s, self._open_source = patience_s, open_source
        self._finder = VersionFinder(relay, target, holder)
        self._rate = 0.0
        self._threads = threads or DigestThreads()
        self._means = FetchMeans(
            threads=self._threads, cache=cache or BlobCache(0), streams=streams, silence_s=silence_s
        )

    async def manifest(
        self,
        run_id: str,
        policy: str,
        version: int,
        *,
        publisher: bytes = b"",
        root: bytes = b"",
        limits: ManifestLimits = ManifestLimits(),  # noqa: B008
    ) -> Manifest:
        """A version's manifest (0: the newest's), checked; signed by `publisher`, and of `root`, where these are given.

        Raises as `VersionFinder.manifest`; errors that may pass, only once patience has ended.
        """

        def ask() -> Awaitable[Manifest]:
            return self._finder.manifest(run_id, policy, version, publisher=publisher, root=root, limits=limits)

        return await retrying(ask, patience_s=self._patience_s, on=_PASSING)

    async def pull(
        self,
        run_id: str,
        version: PolicyVersion,
        mirror: Mirror,
        manifest: Manifest,
        *,
        publisher: bytes = b"",
        wanted: Iterable[Place] | None = None,
        changes: ElementChanges | None = None,
    ) -> Pulled:
        """Bring `mirror`, which the caller holds, or its `wanted` places to `version`. `manifest`: the version's.

        Raises `InvalidRequest` if the manifest is another version's, or not of the mirror's geometry;
        `VersionUnavailable` if no way leads there; `Unavailable`, `ChunkCorrupt` or `NoCapacity` after `patience_s`
        without progress. What was done until then stays, and is not fetched again.
        """
        if (run_id, version) != (manifest.run_id, manifest.version):
            raise InvalidRequest("the manifest is not that of the version announced", field="version.root")
        if not same_geometry(manifest, mirror.manifest):
            raise InvalidRequest("has other tensors than the mirror was made for: make another", field="manifest")
        start = time.monotonic()
        source = GrpcSource(self._relay, self._target, self._holder(), run_id=run_id)
        relay = OpenSource(source, "weight-relay", self._target, UNLISTED)
        order = FetchOrder(manifest, mirror, publisher, None if wanted is None else tuple(wanted), changes)
        pull = Pull(order, self._finder, relay, self._open_source, self._holder(), self._means, self._rate)
        try:
            await self._persist(pull)
        finally:
            await pull.close()
        seconds = time.monotonic() - start
        sink = pull.sink
        if sink.bytes_by_source:
            self._rate = sum(sink.bytes_by_source.values()) / seconds
        return Pulled(
            bytes_by_source=sink.bytes_by_source,
            seconds=seconds,
            tiles=sink.tiles,
            reused=pull.reused or 0,
            digests_s=sink.digests_s,
            ways=tuple(pull.ways),
        )

    async def _persist(self, pull: Pull) -> None:
        """Do rounds until one succeeds. Give up when none has made a tile for as long as patience lasts."""
        give_up, waits = time.monotonic() + self._patience_s, pauses()
        while True:
            before = pull.sink.tiles
            try:
                return await pull.round()
            except _PASSING as error:
                wait = max(next(waits), error.retry_after_s if isinstance(error, NoCapacity) else 0.0)
                if pull.sink.tiles > before:
                    give_up, waits = time.monotonic() + self._patience_s, pauses()
                elif time.monotonic() + wait > give_up:
                    raise
            await asyncio.sleep(wait)

    async def tell(self, run_id: str, version: PolicyVersion, *, kept: bool = True, install_s: float = 0.0) -> float:
        """Report that this holder has a version and took `install_s` to install it. Returns the seconds after which
        the relay wants to hear it again. Raises the relay's errors at once.

        `kept`: the mirror still has all of it and serves it; otherwise the holder is reported as unreachable.
        """
        holder = self._holder()
        request = WayRequest(
            run_id=run_id,
            policy=version.policy,
            holder=holder if kept else replace(holder, address="", lasting=False),
            version=version.version,
            have=(version.version,) if kept else (),
            bytes_per_s=self._rate,
            done=True,
            install_s=install_s,
        )
        return (await self._finder.find(request)).again_s

    def forget(self) -> None:
        """Drop the blobs kept so far."""
        self._means.cache.clear()

    def warm_up(self) -> None:
        """Prepare for patches in the background: a process's first one takes seconds."""

        def work() -> None:
            from ebbtide.weights.patch import warm_up

            warm_up()

        self._threads.begin(work)

    def close(self) -> None:
        self._threads.close()
