"""Fetches the blobs of one plan and makes the mirror's tiles of them.

Invariant: a tile is written only once it matched the manifest's digest. Blobs in memory are at most a batch for each
stream. Tiles that were made stay, however this ends.
"""

from collections.abc import Awaitable, Callable

from msgspec import Struct, field

from ebbtide.errors import ChunkCorrupt
from ebbtide.transfer.blob_fetcher import BlobFetcher
from ebbtide.transfer.fetch_batches import FetchBatch, FetchWork
from ebbtide.transfer.mirror.digest_threads import DigestThreads
from ebbtide.transfer.mirror.element_changes import ElementChanges
from ebbtide.transfer.mirror.mirror import Mirror
from ebbtide.transfer.sources.blob_cache import BlobCache
from ebbtide.transfer.sources.source_pool import SourcePool
from ebbtide.transfer.version_finder import FoundVersion
from ebbtide.types.weights import Manifest
from ebbtide.weights import Place, TileTask, places


class FetchOrder(Struct, frozen=True):
    target: Manifest
    mirror: Mirror
    publisher: bytes
    #: Some places, or None for all.
    wanted: tuple[Place, ...] | None
    changes: ElementChanges | None

    def places(self) -> list[Place]:
        return list(places(self.target)) if self.wanted is None else list(self.wanted)


class FetchMeans(Struct, frozen=True, kw_only=True):
    """What pulls are done with."""

    threads: DigestThreads
    cache: BlobCache
    streams: int
    silence_s: float
    #: Bytes/s that sources of each tier sent in the last pulls.
    rates: dict[int, float] = field(default_factory=dict)


class MirrorFetch:
    """Makes the tiles of one pull, plan by plan. Counts what it has done so far: `bytes_by_source` that came, `tiles`
    that were made, the seconds that digests took."""

    def __init__(self, order: FetchOrder, pool: SourcePool, means: FetchMeans) -> None:
        self._order, self._pool, self._means = order, pool, means
        self._broken: list[Place] = []
        self.bytes_by_source: dict[str, int] = {}
        self.tiles = 0
        self.digests_s = 0.0

    async def run(self, work: FetchWork, ask: Callable[[], Awaitable[FoundVersion]], again_s: float) -> list[Place]:
        """Fetch and make all of it; `ask` and `again_s` as in `BlobFetcher.run`. Returns the places that are not what
        the manifest says, though all blobs were right. Raises why not all came."""
        means, self._broken = self._means, []
        batches, streams, known = work.batches(means.streams), means.streams, means.cache.get
        fetcher = BlobFetcher(batches, self._take, self._pool, means.threads, streams, means.silence_s, known=known)
        try:
            await fetcher.run(ask, again_s)
        finally:
            self.digests_s += fetcher.digests_s
        return self._broken

    async def _take(self, batch: FetchBatch, blobs: dict[bytes, bytes], source: str) -> None:
        """Hand blobs on to peers, and make the tiles that are complete with them."""
        batch.verified |= blobs
        if source:
            self.bytes_by_source[source] = self.bytes_by_source.get(source, 0) + sum(map(len, blobs.values()))
        for digest in blobs.keys() - batch.dense:
            self._means.cache.put(digest, blobs[digest])
        if tasks := batch.take_ready():
            broken, took = await self._means.threads.run(lambda: self._make(tasks, batch.verified))
            self._broken += broken
            self.tiles += len(tasks) - len(broken)
            self.digests_s += took
        for digest in blobs.keys() & batch.dense:
            self._means.cache.put(digest, blobs[digest], keep=False)  # now that the mirror has it

    def _make(self, tasks: list[TileTask], blobs: dict[bytes, bytes]) -> tuple[list[Place], float]:
        """The tiles that came out wrong, and the seconds that digests took."""
        took = 0.0
        broken: list[Place] = []
        for task in tasks:
            try:
                took += self._order.mirror.apply(task, blobs, self._order.changes, checked=True)
            except ChunkCorrupt:
                broken.append(task.place)
        return broken, took
