"""Fetching what a plan asks for, in a few streams at once, and applying it to the mirror.

Invariant: a blob is used only once it matched its digest, a tile is written only once it matched the manifest's; blobs
in memory are at most a batch for each stream. What was done stays done, however this ends.
"""

import asyncio
import time
from collections import deque
from contextlib import aclosing, suppress
from typing import Final

from msgspec import Struct, field

from ebbtide.errors import ChunkCorrupt, EbbtideError, NoCapacity, NotReady, Unavailable
from ebbtide.transfer.fetch_batches import FetchBatch, FetchWork
from ebbtide.transfer.mirror.digest_threads import DigestThreads
from ebbtide.transfer.mirror.element_changes import ElementChanges
from ebbtide.transfer.mirror.mirror import Mirror
from ebbtide.transfer.sources.blob_cache import BlobCache
from ebbtide.transfer.sources.source_pool import OpenSource, SourcePool
from ebbtide.types.weights import Manifest
from ebbtide.weights import Place, TileTask, check_tile

#: Blobs and tiles after which what has come is verified and applied: what a thread is worth being woken for.
_SETTLE_BYTES: Final = 1 << 20
_SETTLE_BLOBS: Final = 32


class FetchOrder(Struct, frozen=True):
    """What is wanted. `wanted`: some places, or None for all."""

    target: Manifest
    mirror: Mirror
    publisher: bytes
    wanted: tuple[Place, ...] | None
    changes: ElementChanges | None


class FetchMeans(Struct, frozen=True, kw_only=True):
    """What it is done with. `streams`: how many at once; `silence_s`: for how long a source may send nothing; `rates`:
    bytes/s that sources of each tier sent in the last pulls."""

    threads: DigestThreads
    cache: BlobCache
    streams: int
    silence_s: float
    rates: dict[int, float] = field(default_factory=dict)


class FetchTally(Struct):
    """What has been done so far."""

    bytes_by_source: dict[str, int] = field(default_factory=dict)
    tiles: int = 0
    reused: int = -1
    digests_s: float = 0.0


class BlobFetch:
    """The fetching of one plan. `broken`: places that are not what the manifest says, though all blobs were right."""

    def __init__(
        self, work: FetchWork, order: FetchOrder, pool: SourcePool, means: FetchMeans, tally: FetchTally
    ) -> None:
        self._work, self._order, self._pool, self._means, self._tally = work, order, pool, means, tally
        self._batches = deque(work.batches(means.streams))
        self._failure: EbbtideError | None = None
        self._going = asyncio.Event()
        self.hurry = asyncio.Event()  # better sources are wanted
        self.broken: list[Place] = []

    async def run(self) -> None:
        """Fetch and apply all of it. Raises why not all came."""
        before = self._tally.tiles
        async with asyncio.TaskGroup() as group:
            for number in range(min(self._means.streams, len(self._batches))):
                group.create_task(self._stream(first=not number))
        if isinstance(self._failure, NotReady):
            raise Unavailable(f"what was named has been let go since ({self._failure}); ask again")
        if self._failure is not None:
            raise self._failure
        if self._tally.tiles - before + len(self.broken) < self._work.tiles:
            raise Unavailable("a source was closed while it was read")  # gRPC ends its calls as if cancelled

    async def _stream(self, *, first: bool) -> None:
        """Batch after batch, each from one source after another until it is whole. The others begin once the first has
        got something: where a link is so slow that one blob takes its time, a blob for each would take several."""
        if not first:
            await self._going.wait()
        try:
            while self._batches and self._failure is None:
                batch = self._batches.popleft()
                self._take_cached(batch)
                await self._settle(batch)
                while batch.missing and self._failure is None:
                    await self._serve(batch)
        finally:
            self._going.set()

    def _take_cached(self, batch: FetchBatch) -> None:
        for digest in batch.missing:
            if (data := self._means.cache.get(digest)) is not None:
                batch.verified[digest] = data

    async def _serve(self, batch: FetchBatch) -> None:
        """Have a source send what it can of a batch."""
        while wait := self._pool.busy_s(batch.lacking):
            self.hurry.set()  # the relay may know of others by now
            await asyncio.sleep(wait)
        try:
            source = self._pool.pick(batch.lacking)
        except EbbtideError as error:
            self._failure = error
            return
        with self._pool.blaming(source, batch.lacking):
            await self._read(source, batch)

    async def _read(self, source: OpenSource, batch: FetchBatch) -> None:
        """Get what is missing of a batch. Raises why not all of it came; what came before is used, and is its doing."""
        missing, silence_s = batch.missing, self._means.silence_s
        try:
            patience = source.patience(silence_s, max(batch.sizes[digest] for digest in missing))
            async with patience as clock, aclosing(source.source.tiles(missing)) as stream:
                async for digest, data in stream:
                    source.heard(silence_s, len(data))
                    batch.take(digest, data)
                    self._going.set()
                    if batch.fresh_bytes >= _SETTLE_BYTES or len(batch.fresh) >= _SETTLE_BLOBS:
                        with source.resting(clock, silence_s):
                            await self._settle(batch, source)
                    if batch.missing and self._pool.lags(source, batch.lacking):
                        self.hurry.set()
                        raise NoCapacity(f"{source.name} at {source.address} is slow", retry_after_s=0.0)
        except EbbtideError:
            await self._settle(batch, source)
            raise
        await self._settle(batch, source)
        if batch.missing:
            raise Unavailable(f"{source.name} at {source.address} ended before it had sent all")

    async def _settle(self, batch: FetchBatch, source: OpenSource | None = None) -> None:
        """Verify what has come, hand it on to peers, and apply what is complete. Raises `ChunkCorrupt` for a blob that
        is not what its digest says; the others are kept."""
        fresh = batch.take_fresh()
        good, took = await self._means.threads.run(lambda: _verified(fresh))
        self._tally.digests_s += took
        batch.verified |= good
        if source is not None and good:
            self._pool.served()
            came = self._tally.bytes_by_source
            came[source.name] = came.get(source.name, 0) + sum(map(len, good.values()))
        for digest in good.keys() - batch.dense:
            self._means.cache.put(digest, good[digest])
        if tasks := batch.take_ready():
            self._note(*await self._means.threads.run(lambda: self._apply(tasks, batch.verified)))
        for digest in good.keys() & batch.dense:
            self._means.cache.put(digest, good[digest], keep=False)  # now that the mirror has it
        if len(good) < len(fresh):
            raise ChunkCorrupt("a blob came that does not match its digest")

    def _apply(self, tasks: list[TileTask], blobs: dict[bytes, bytes]) -> tuple[int, list[Place], float]:
        took = 0.0
        broken: list[Place] = []
        for task in tasks:
            try:
                took += self._order.mirror.apply(task, blobs, self._order.changes, checked=True)
            except ChunkCorrupt:
                broken.append(task.place)
        return len(tasks) - len(broken), broken, took

    def _note(self, done: int, broken: list[Place], took: float) -> None:
        self._tally.tiles += done
        self._tally.digests_s += took
        self.broken += broken


def _verified(blobs: dict[bytes, bytes]) -> tuple[dict[bytes, bytes], float]:
    """Those that match their digests, and the seconds that it took to tell."""
    good: dict[bytes, bytes] = {}
    start = time.perf_counter()
    for digest, data in blobs.items():
        with suppress(ChunkCorrupt):
            check_tile(digest, data)
            good[digest] = data
    return good, time.perf_counter() - start
