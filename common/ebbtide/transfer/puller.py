"""Getting versions: for the fewest bytes from where a mirror is, by whoever has them, believing nobody.

Invariant: `Puller` holds nothing between pulls but manifests, channels' states and the rates last seen. A pull that
ends in any way, the process's death included, leaves in the mirror what it had done; the next one goes on from there.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from ebbtide.errors import ChunkCorrupt, InvalidRequest, NoCapacity, Unavailable
from ebbtide.rpc.backoff import pauses, retrying
from ebbtide.transfer.mirror.digest_threads import DigestThreads
from ebbtide.transfer.mirror.element_changes import ElementChanges
from ebbtide.transfer.mirror.mirror import Mirror
from ebbtide.transfer.mirror_fetch import FetchMeans, FetchOrder
from ebbtide.transfer.pull import Pull
from ebbtide.transfer.sources.blob_cache import BlobCache
from ebbtide.transfer.sources.source_pool import UNLISTED, OpenSource
from ebbtide.transfer.sources.tile_source import GrpcSource, Opener
from ebbtide.transfer.version_finder import VersionFinder, VersionQuestion
from ebbtide.types.weights import FoundWay, Holder, Manifest, PolicyVersion
from ebbtide.v1.weights_pb2_grpc import WeightsStub
from ebbtide.weights import ManifestLimits, Place, same_geometry

T = TypeVar("T")
#: What patience waits out: the relay is away or full, or somebody sent what is wrong.
_PASSING: Final = (Unavailable, ChunkCorrupt, NoCapacity)


class Pulled(Struct, frozen=True, kw_only=True):
    """What a pull took. `tiles` were brought to the version, `reused` were its already; `digests_s` of the threads'
    time went into digests. `ways` are those that were gone, the last one asked for last."""

    bytes_by_source: dict[str, int]
    seconds: float
    tiles: int
    reused: int
    digests_s: float
    ways: tuple[FoundWay, ...]

    @property
    def bytes(self) -> int:
        return sum(self.bytes_by_source.values())


class Puller:
    """Gets versions as one relay knows them, from it and from others that it names."""

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
        """`target`: the relay's address, for errors. `holder`: who asks, as it stands now. `patience_s`: for how long a
        pull goes on without any progress. `open_source`: see `sources.opener`. `cache` gets the verified blobs.
        `streams`: how many at once. `silence_s`: for how long a source may send nothing. `threads`, for
        digests and patches, end with this."""
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

        Raises `InvalidRequest`, `PermissionDenied`, `VersionUnavailable`; `ChunkCorrupt` or `Unavailable` if that is
        how it still was when patience ended.
        """
        return await self._patiently(
            lambda: self._finder.manifest(run_id, policy, version, publisher=publisher, root=root, limits=limits)
        )

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
        """Bring `mirror`, which the caller holds, to `version`; or some places of it, if these are `wanted`.

        `manifest` is that version's, from `manifest`. Raises `InvalidRequest` if it is not, or not of the mirror's
        geometry; `VersionUnavailable` if no way leads there; `Unavailable`, `ChunkCorrupt` or `NoCapacity` if that is
        how it was when nothing had moved for `patience_s`. What was done until then stays, and is not fetched again.
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
        fetch = pull.fetch
        if fetch.bytes_by_source:
            self._rate = sum(fetch.bytes_by_source.values()) / seconds
        return Pulled(
            bytes_by_source=fetch.bytes_by_source,
            seconds=seconds,
            tiles=fetch.tiles,
            reused=pull.reused or 0,
            digests_s=fetch.digests_s,
            ways=tuple(pull.ways),
        )

    async def _persist(self, pull: Pull) -> None:
        """Rounds until it is done; gives up when none has moved anything for as long as patience lasts."""
        give_up, waits = time.monotonic() + self._patience_s, pauses()
        while True:
            before = pull.fetch.tiles
            try:
                return await pull.round()
            except _PASSING as error:
                wait = max(next(waits), error.retry_after_s if isinstance(error, NoCapacity) else 0.0)
                if pull.fetch.tiles > before:
                    give_up, waits = time.monotonic() + self._patience_s, pauses()
                elif time.monotonic() + wait > give_up:
                    raise
            await asyncio.sleep(wait)

    async def tell(self, run_id: str, version: PolicyVersion, *, kept: bool = True, install_s: float = 0.0) -> float:
        """Tell the relay that this holder has done with a version, and took `install_s` to install it; returns in how
        many seconds it wants to hear that again. Raises what the relay does, at once.

        `kept`: it still has all of it, and serves it on; without, it is told as one whom nobody reaches.
        """
        question = VersionQuestion(
            run_id=run_id,
            policy=version.policy,
            version=version.version,
            have=(version.version,) if kept else (),
            bytes_per_s=self._rate,
            done=True,
            install_s=install_s,
        )
        holder = self._holder()
        if not kept:
            holder = replace(holder, address="", lasting=False)
        return (await self._finder.find(question, holder)).again_s

    def forget(self) -> None:
        """Keep none of the blobs that have come so far."""
        self._means.cache.clear()

    def warm_up(self) -> None:
        """Make ready for patches in the background, which takes seconds in a process that has not seen one."""

        def work() -> None:
            from ebbtide.weights.patch.tile_codec import warm_up

            warm_up()

        self._threads.begin(work)

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        return await retrying(call, patience_s=self._patience_s, on=_PASSING)

    def close(self) -> None:
        self._threads.close()
