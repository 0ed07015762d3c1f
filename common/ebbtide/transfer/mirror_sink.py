"""Makes a mirror's tiles of the blobs that a `BlobFetcher` hands over, and gives the blobs to waiting peers.

Invariant: a tile is written only once it matches the manifest's digest. At most one batch for each stream is in memory.
Tiles that were made stay, however the pull ends.
"""

from msgspec import Struct

from ebbtide.errors import ChunkCorrupt
from ebbtide.transfer.blob_fetcher import FetchMeans
from ebbtide.transfer.fetch_batches import FetchBatch
from ebbtide.transfer.mirror.element_changes import ElementChanges
from ebbtide.transfer.mirror.mirror import Mirror
from ebbtide.types.weights import Manifest
from ebbtide.weights import Place, TileTask, places


class FetchOrder(Struct, frozen=True):
    target: Manifest
    mirror: Mirror
    publisher: bytes
    wanted: tuple[Place, ...] | None  # None: all places
    changes: ElementChanges | None

    def places(self) -> list[Place]:
        return list(places(self.target)) if self.wanted is None else list(self.wanted)


class MirrorSink:
    """Takes the blobs of one pull, and counts what they came to."""

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
