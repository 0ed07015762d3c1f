"""Fetches the blobs of one plan and makes the mirror's tiles of them.

Invariant: a tile is written only once it matched the manifest's digest. Blobs in memory are at most a batch for each
stream. Tiles that were made stay, however this ends.
"""

from collections.abc import Awaitable, Callable
from typing import Final

from msgspec import Struct, field

from ebbtide.errors import ChunkCorrupt, NotReady, Unavailable
from ebbtide.transfer.blob_fetcher import BlobFetcher, FetchLimits, SourcesExhausted
from ebbtide.transfer.fetch_batches import FetchBatch, FetchWork
from ebbtide.transfer.mirror.digest_threads import DigestThreads
from ebbtide.transfer.mirror.element_changes import ElementChanges
from ebbtide.transfer.mirror.mirror import Mirror
from ebbtide.transfer.sources.blob_cache import BlobCache
from ebbtide.transfer.sources.source_pool import SourcePool
from ebbtide.transfer.version_finder import FoundVersion
from ebbtide.types.weights import Manifest
from ebbtide.weights import Place, TileTask, places

#: Blobs and tiles after which what has come is verified and applied: enough to be worth waking a thread.
_HAND_OVER_BYTES: Final = 1 << 20
_HAND_OVER_BLOBS: Final = 32


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
    limits: FetchLimits
    #: Bytes/s that sources of each tier sent in the last pulls.
    rates: dict[int, float] = field(default_factory=dict)


def fetch_limits(streams: int, silence_s: float) -> FetchLimits:
    return FetchLimits(
        streams=streams,
        silence_s=silence_s,
        hand_over_bytes=_HAND_OVER_BYTES,
        hand_over_blobs=_HAND_OVER_BLOBS,
    )


class FetchTally:
    """What a pull has done so far."""

    def __init__(self) -> None:
        self.bytes_by_source: dict[str, int] = {}
        #: Tiles that were brought to the version, and those that were its already.
        self.tiles = 0
        self.reused = 0
        self.digests_s = 0.0
        self._planned = False

    def plan(self, wanted: int, tiles: int) -> None:
        """So many tiles of those wanted are to be made: what the first plan leaves out was there before."""
        if not self._planned:
            self._planned, self.reused = True, wanted - tiles

    def receive(self, source: str, size: int) -> None:
        self.bytes_by_source[source] = self.bytes_by_source.get(source, 0) + size

    def make(self, tiles: int) -> None:
        self.tiles += tiles

    def spend(self, digests_s: float) -> None:
        self.digests_s += digests_s


class BlobFetch:
    """The sink of one plan's blobs."""

    def __init__(
        self, work: FetchWork, order: FetchOrder, pool: SourcePool, means: FetchMeans, tally: FetchTally
    ) -> None:
        self._order, self._means, self._tally = order, means, tally
        self._fetcher = BlobFetcher(
            work.batches(means.limits.streams), self, pool, means.threads, means.limits, known=means.cache.get
        )
        #: Tiles that are not what the manifest says, though all blobs were right.
        self.broken: list[Place] = []

    async def run(self, ask: Callable[[], Awaitable[FoundVersion]], again_s: float) -> None:
        """Fetch and make all of it; `ask` and `again_s` as in `BlobFetcher.run`. Raises why not all came."""
        try:
            await self._fetcher.run(ask, again_s)
        except SourcesExhausted as exhausted:
            if isinstance(exhausted.error, NotReady):
                raise Unavailable(f"what was named has been let go since ({exhausted}); ask again") from None
            raise exhausted.error from None
        finally:
            self._tally.spend(self._fetcher.digests_s)

    async def take(self, batch: FetchBatch, blobs: dict[bytes, bytes], source: str) -> None:
        """Hand blobs on to peers, and make the tiles that are complete with them."""
        batch.verified |= blobs
        if source:
            self._tally.receive(source, sum(map(len, blobs.values())))
            for digest in blobs.keys() - batch.dense:
                self._means.cache.put(digest, blobs[digest])
        if tasks := batch.take_ready():
            broken, took = await self._means.threads.run(lambda: self._make(tasks, batch.verified))
            self._tally.make(len(tasks) - len(broken))
            self._tally.spend(took)
            self.broken += broken
        if source:
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
