"""Pulls a version into a mirror with the fewest bytes, from any source, and verifies every blob.

Invariant: between pulls a `Puller` keeps only manifests, channels' states and the latest rates. A pull that ends in any
way, the process's death included, leaves in the mirror what it did; the next one goes on from there.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from ebbtide.errors import (
    ChunkCorrupt,
    EbbtideError,
    InvalidRequest,
    NoCapacity,
    NotReady,
    PermissionDenied,
    Unavailable,
    VersionUnavailable,
)
from ebbtide.rpc.backoff import pauses, retrying
from ebbtide.transfer.blob_cache import BlobCache
from ebbtide.transfer.blob_fetcher import BlobBatch, BlobFetcher, FetchMeans
from ebbtide.transfer.digest_threads import DigestThreads
from ebbtide.transfer.element_changes import ElementChanges
from ebbtide.transfer.mirror import Mirror
from ebbtide.transfer.sources import UNLISTED, GrpcSource, Opener, OpenSource, SourcePool
from ebbtide.transfer.version_finder import FoundVersion, PathRequest, VersionFinder, is_usable
from ebbtide.types.weights import FetchPath, Holder, Manifest, PolicyVersion
from ebbtide.v1.weights_pb2_grpc import WeightsStub
from ebbtide.weights import ManifestLimits, Place, Planner, TileTask, Way, blob_sizes, places, same_geometry, tile_sizes

#: Bytes of one batch, which one stream holds at a time: large enough to keep a link busy between two requests, small
#: enough that peers that read from this host are not far behind.
_MOST_BYTES: Final = 8 << 20
_LEAST_BYTES: Final = 1 << 20
#: Tiles of one batch, so that progress shows even where patches are tiny.
_MOST_TILES: Final = 512


class FetchBatch(BlobBatch):
    """Tiles to make, and the blobs that they need."""

    def __init__(self, groups: Sequence[Sequence[TileTask]], sizes: Mapping[bytes, int]) -> None:
        """`groups`: the tiles of each are made of the same blobs."""
        super().__init__({digest: sizes[digest] for group in groups for digest in group[0].blobs})
        self._groups = list(groups)
        #: Blobs that are tiles of the wanted version as they come: the mirror will have them.
        self.dense = {group[0].dense for group in groups if group[0].dense == group[0].digest}
        self.verified: dict[bytes, bytes] = {}

    def take_ready(self) -> list[TileTask]:
        """Remove the tiles whose blobs are all verified."""
        ready: list[TileTask] = []
        waiting: list[Sequence[TileTask]] = []
        for group in self._groups:
            if all(digest in self.verified for digest in group[0].blobs):
                ready += group
            else:
                waiting.append(group)
        self._groups = waiting
        return ready


class FetchWork:
    """Splits the work of one pull into batches that fit into memory.

    Tiles that are made of the same blobs share a batch, so that each blob is fetched once.
    """

    def __init__(
        self, target: Manifest, ways: Sequence[Way], places: Iterable[Place], held: dict[Place, bytes]
    ) -> None:
        """Plan for `places`. It takes time: do it in a thread."""
        groups: dict[tuple[bytes, ...], list[TileTask]] = {}
        self.lost: list[Place] = []
        for found in Planner(target, ways).tasks(places, held):
            if isinstance(found, TileTask):
                groups.setdefault(found.blobs, []).append(found)
            else:
                self.lost.append(found)
        self._groups = list(groups.values())
        known = _sizes(ways)
        self.sizes = {digest: known[digest] for blobs in groups for digest in blobs}

    @property
    def tiles(self) -> int:
        return sum(map(len, self._groups))

    @property
    def bytes(self) -> int:
        return sum(self.sizes.values())

    def batches(self, streams: int) -> Iterator[FetchBatch]:
        """Yield the tasks in the manifest's order, in pieces that `streams` share until the end."""
        most = min(_MOST_BYTES, max(_LEAST_BYTES, self.bytes // (4 * streams)))
        groups: list[list[TileTask]] = []
        size = tiles = 0
        for group in self._groups:
            if groups and (size + group[0].cost > most or tiles + len(group) > _MOST_TILES):
                yield FetchBatch(groups, self.sizes)
                groups, size, tiles = [], 0, 0
            groups.append(group)
            size += group[0].cost
            tiles += len(group)
        if groups:
            yield FetchBatch(groups, self.sizes)


def _sizes(ways: Iterable[Way]) -> dict[bytes, int]:
    """Return the bytes of every blob of some ways."""
    sizes: dict[bytes, int] = {}
    for way in ways:
        if way.keyframe:
            sizes |= tile_sizes(way.start)
        for patch in way.patches:
            sizes |= blob_sizes(patch)
    return sizes


class FetchOrder(Struct, frozen=True):
    target: Manifest
    mirror: Mirror
    publisher: bytes
    wanted: tuple[Place, ...] | None  # None: all places
    changes: ElementChanges | None

    def places(self) -> list[Place]:
        return list(places(self.target)) if self.wanted is None else list(self.wanted)


class MirrorSink:
    """Makes a mirror's tiles of the blobs that a `BlobFetcher` hands over, and gives the blobs to waiting peers.

    Invariant: a tile is written only once it matches the manifest's digest. At most one batch for each stream is in
    memory. Tiles that were made stay, however the pull ends.
    """

    def __init__(self, order: FetchOrder, means: FetchMeans) -> None:
        self._order, self._means = order, means
        self.bytes_by_source: dict[str, int] = {}
        self.tiles = 0  # made
        self.broken: list[Place] = []  # tiles that came out wrong of right blobs
        self.digests_s = 0.0

    async def take(self, batch: FetchBatch, blobs: dict[bytes, bytes], source: str) -> None:
        """Give blobs to peers, and make the tiles that are complete with them."""
        batch.verified |= blobs
        if source:
            self.bytes_by_source[source] = self.bytes_by_source.get(source, 0) + sum(map(len, blobs.values()))
        for digest in blobs.keys() - batch.dense:
            self._means.cache.put(digest, blobs[digest])
        if tasks := batch.take_ready():
            broken, took = await self._means.threads.run(lambda: self._make(tasks, batch.verified))
            self.broken += broken
            self.tiles += len(tasks) - len(broken)
            self.digests_s += took
        for digest in blobs.keys() & batch.dense:
            self._means.cache.put(digest, blobs[digest], keep=False)  # now that the mirror has it

    def _make(self, tasks: list[TileTask], blobs: dict[bytes, bytes]) -> tuple[list[Place], float]:
        """Return the tiles that came out wrong, and the seconds that digests took."""
        took = 0.0
        broken: list[Place] = []
        for task in tasks:
            try:
                took += self._order.mirror.apply(task, blobs, self._order.changes, checked=True)
            except ChunkCorrupt:
                broken.append(task.place)
        return broken, took


class Pull:
    """Brings a mirror to one version in rounds: each asks for ways, plans, and fetches.

    Invariant: only the mirror's tiles, the refused ways and the lists of the others outlive a round. So any error may
    end it, and the next round goes on from there. The relay hears that a version is held only when all of it is.
    """

    def __init__(
        self,
        order: FetchOrder,
        finder: VersionFinder,
        relay: OpenSource,
        open_source: Opener,
        reader: Holder,
        means: FetchMeans,
        bytes_per_s: float,
    ) -> None:
        """`bytes_per_s`: the reader's rate lately; 0: not known."""
        self.reused: int | None = None  # tiles that were the version's already
        self.ways: list[FetchPath] = []  # that were used, the latest last
        self._order, self._finder, self._means, self._bytes_per_s = order, finder, means, bytes_per_s
        self._threads, self._wanted = means.threads, order.places()
        self._pool = SourcePool(relay, open_source, reader, means.rates)
        self.sink = MirrorSink(order, means)
        self._lists: dict[FetchPath, Way] = {}
        self._refused: set[FetchPath] = set()
        self._scratch = False

    async def close(self) -> None:
        await self._pool.close()

    async def round(self) -> None:
        """Ask, plan and fetch once. Raises why not all tiles are there; what is done is kept."""
        order, version, cache = self._order, self._order.target.version, self._means.cache
        await self._threads.run(order.mirror.mend)
        have = self._have()
        with ExitStack() as peers:
            with cache.planning():
                found = await self._ask(have)  # from here on the relay may send peers here
                work = await self._plan(found, have, await self._threads.run(order.mirror.held))
                peers.enter_context(cache.arriving(work.sizes))
            if self.reused is None:
                self.reused = len(self._wanted) - work.tiles
            order.mirror.remember(order.target.run_id, version.policy, [*have, version.version])
            await self._fetch(work, found.again_s)
        if order.wanted is None:
            order.mirror.remember(order.target.run_id, version.policy, [version.version])
            with suppress(EbbtideError):  # the relay hears of it later: when this holder serves or installs it
                await self._finder.find(self._request([version.version], done=True))

    async def _fetch(self, work: FetchWork, again_s: float) -> None:
        sink, means = self.sink, self._means
        sink.broken.clear()
        fetcher = BlobFetcher(work.batches(means.streams), sink.take, self._pool, means)
        try:
            await fetcher.run(lambda: self._ask(self._have()), again_s)
        finally:
            sink.digests_s += fetcher.digests_s
        if broken := sink.broken:
            # The blobs were right and the tiles were not: the base was damaged, or the lists lie.
            await self._threads.run(lambda: self._order.mirror.mend(broken))
            self._refused.update(way for way in self._lists if way.via)
            self._scratch = True
            raise ChunkCorrupt(f"{len(broken)} tiles are not the version's after their patches")

    # -- where it comes from -------------------------------------------------------------------------------------

    def _have(self) -> list[int]:
        return self._order.mirror.versions(self._order.target.run_id, self._order.target.version.policy)

    def _request(self, have: list[int], *, done: bool = False) -> PathRequest:
        target = self._order.target
        return PathRequest(
            run_id=target.run_id,
            policy=target.version.policy,
            version=target.version.version,
            have=tuple(have),
            bytes_per_s=self._bytes_per_s,
            failed=self._pool.failed,
            done=done,
            scratch=self._scratch and not done,
        )

    async def _ask(self, have: list[int]) -> FoundVersion:
        return await self._pool.ask(lambda: self._finder.find(self._request(have)))

    async def _plan(self, found: FoundVersion, have: list[int], held: dict[Place, bytes]) -> FetchWork:
        """Plan along the first ways that reach every place. Raises `VersionUnavailable` if none do."""
        order, wanted = self._order, self._wanted
        ways: list[Way] = []
        work = await self._threads.run(lambda: FetchWork(order.target, ways, wanted, held))
        kind = ChunkCorrupt if self._refused else VersionUnavailable
        failure: EbbtideError = kind(f"{len(work.lost)} tiles cannot be made: no way to them is known")
        while work.lost:
            for way in found.ways:
                if way in self._refused or not is_usable(way, have):
                    continue
                try:
                    ways.append(await self._way(way))
                except (InvalidRequest, ChunkCorrupt, PermissionDenied, NotReady) as error:
                    failure = error
                    continue
                work = await self._threads.run(lambda: FetchWork(order.target, ways, wanted, held))
                if not work.lost:
                    return work
            if self._scratch:
                raise failure
            self._scratch = True  # the mirror has lost tiles: ask for ways from anywhere
            found = await self._ask(have)
        return work

    async def _way(self, found: FetchPath) -> Way:
        if found not in self._lists:
            target, publisher = self._order.target, self._order.publisher
            manifests, patches = await self._finder.way(found, target, publisher=publisher)
            self._lists[found] = Way(manifests[0], patches, found.keyframe)
        if found not in self.ways:
            self.ways.append(found)
        return self._lists[found]


#: Errors that may pass: the relay is away or full, or a source sent wrong blobs.
_PASSING: Final = (Unavailable, ChunkCorrupt, NoCapacity)


class Pulled(Struct, frozen=True, kw_only=True):
    """The cost of a pull."""

    bytes_by_source: dict[str, int]
    seconds: float
    tiles: int  # made
    reused: int  # tiles that were the version's already
    digests_s: float  # of the threads' time
    ways: tuple[FetchPath, ...]  # that were used, the latest last

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
        long a pull goes on without progress. `open_source`: see `sources.opener`. `cache` gets the verified blobs.
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
        request = PathRequest(
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
