"""Fetches blobs from a pool of sources in several streams, verifies each, and gives it to a sink.

A `BlobFetcher` knows sources and digests, and nothing of tensors. Its sink decides what becomes of a blob: a
`MirrorSink` makes a mirror's tiles, the weight-relay's sink fills its stages.

Invariant: the sink gets each blob once, after its digest has matched. What the sink took stays taken, however the
fetch ends. A source is blamed for what it sends or leaves out, never for an error of the sink.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing, suppress
from typing import Final, Generic, TypeVar

from msgspec import Struct, field

from ebbtide.errors import ChunkCorrupt, EbbtideError, NoCapacity, NotReady, Unavailable
from ebbtide.transfer.blob_cache import BlobCache
from ebbtide.transfer.digest_threads import DigestThreads
from ebbtide.transfer.sources import OpenSource, SourcePool
from ebbtide.transfer.version_finder import FoundVersion
from ebbtide.weights import check_tile

log = logging.getLogger(__name__)

#: Shortest time between two requests for better sources, whatever the upstream says.
_AGAIN_S: Final = 1.0
#: A stream verifies and hands over at once when so many bytes have come: enough to be worth waking a thread.
_HAND_OVER_BYTES: Final = 1 << 20
#: To digest fewer bytes takes less time than to wake a thread.
_THREAD_BYTES: Final = 1 << 16


class FetchMeans(Struct, frozen=True, kw_only=True):
    """The means and limits that the fetches of one process share."""

    threads: DigestThreads
    streams: int  # at once
    silence_s: float  # for which a source may send nothing, besides the length of its pauses so far
    hand_over_blobs: int = 32  # of a stream, at which it hands over although they have few bytes
    cache: BlobCache = field(default_factory=lambda: BlobCache(0))  # blobs that need not be fetched
    rates: dict[int, float] = field(default_factory=dict)  # bytes/s of the sources of each tier in former fetches


class BlobBatch:
    """Blobs that one stream fetches.

    Invariant: it keeps no blob that was not asked for, and none that is larger than it may be.
    """

    def __init__(self, sizes: Mapping[bytes, int]) -> None:
        """`sizes`: the most bytes that each blob may have, by digest, in the order of the request."""
        self.missing = dict(sizes)  # until they are verified
        self.lacking: set[str] = set()  # addresses of sources that do not have all of it
        self.fresh: dict[bytes, bytes] = {}  # not verified yet
        self.fresh_bytes = 0

    def take(self, digest: bytes, data: bytes) -> None:
        """Keep a blob that has come. Raises `ChunkCorrupt` if it was not asked for."""
        if len(data) > self.missing.get(digest, -1) or digest in self.fresh:
            raise ChunkCorrupt(f"a blob of {len(data)} bytes came that was not asked for")
        self.fresh[digest] = data
        self.fresh_bytes += len(data)

    def take_fresh(self) -> dict[bytes, bytes]:
        """Remove the blobs that are to be verified."""
        fresh, self.fresh, self.fresh_bytes = self.fresh, {}, 0
        return fresh


B = TypeVar("B", bound=BlobBatch)


class _SinkFailed(Exception):
    """Ends all streams."""


def _ask_again(error: EbbtideError) -> EbbtideError:
    found = f"the sources have dropped a blob meanwhile ({error}); ask again"
    return Unavailable(found) if isinstance(error, NotReady) else error


class BlobFetcher(Generic[B]):
    """Fetches some batches, once."""

    def __init__(
        self,
        batches: Iterable[B],
        sink: Callable[[B, dict[bytes, bytes], str], Awaitable[None]],
        pool: SourcePool,
        means: FetchMeans,
        *,
        exhausted: Callable[[EbbtideError], EbbtideError] = _ask_again,
        on_fault: Callable[[EbbtideError], None] = lambda _error: None,
    ) -> None:
        """`sink` takes verified blobs of a batch and the name of their source; its errors end the fetch. The first
        call for a batch brings the blobs, perhaps none, that the cache has; their source has no name.

        `exhausted` turns an error of `SourcePool.pick` into the one to raise. `on_fault` gets each error of a source.
        """
        self._batches, self._unfinished = deque(batches), 0
        self._sink, self._pool, self._means = sink, pool, means
        self._exhausted, self._on_fault = exhausted, on_fault
        self._first_came = asyncio.Event()
        self._hurry = asyncio.Event()  # better sources are wanted
        self._failure: EbbtideError | None = None
        self.digests_s = 0.0  # that digests took

    async def run(self, ask: Callable[[], Awaitable[FoundVersion]], again_s: float) -> None:
        """Fetch all blobs. Meanwhile `ask` for better sources every `again_s` (0: never), and sooner if they are slow.

        Raises what the sink or `exhausted` gave; `Unavailable` if a source was closed while it was read.
        """
        renewal = asyncio.create_task(self._renew(ask, again_s))
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(min(self._means.streams, len(self._batches))):
                    group.create_task(self._stream(first=not number))
        except* _SinkFailed:
            pass
        finally:
            renewal.cancel()
            await asyncio.gather(renewal, return_exceptions=True)
        if self._failure is not None:
            raise self._failure
        if self._batches or self._unfinished:
            raise Unavailable("a source was closed while it was read")  # gRPC ends its calls as if cancelled

    async def _renew(self, ask: Callable[[], Awaitable[FoundVersion]], again_s: float) -> None:
        while again_s > 0:
            await asyncio.sleep(_AGAIN_S)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), max(0.0, again_s - _AGAIN_S))
            self._hurry.clear()
            try:
                again_s = (await ask()).again_s
            except EbbtideError as error:
                log.info("no better sources of weights: the request failed (%s)", error)

    async def _stream(self, *, first: bool) -> None:
        """Fetch batch after batch. The other streams wait for the first blob: on a link so slow that one blob takes
        long, one blob for each stream would take several times as long."""
        if not first:
            await self._first_came.wait()
        try:
            while self._batches and self._failure is None:
                await self._fetch(self._batches.popleft())
        finally:
            self._first_came.set()

    async def _fetch(self, batch: B) -> None:
        """Fetch a batch from one source after another until it is whole."""
        self._unfinished += 1
        known = {digest: data for digest in batch.missing if (data := self._means.cache.get(digest)) is not None}
        await self._hand_over(batch, known, "")
        while batch.missing and self._failure is None:
            await self._serve(batch)
        self._unfinished -= 1

    async def _serve(self, batch: B) -> None:
        """Have one source send what it can of a batch."""
        while wait := self._pool.busy_s(batch.lacking):
            self._hurry.set()  # the upstream may know of others by now
            await asyncio.sleep(wait)
        try:
            source = self._pool.pick(batch.lacking)
        except EbbtideError as error:
            self._failure = self._exhausted(error)
            return
        with self._pool.blaming(source, batch.lacking, self._on_fault):
            await self._read(source, batch)

    async def _read(self, source: OpenSource, batch: B) -> None:
        """Read what a batch lacks. Raises why it did not come whole; the blobs that came are used all the same."""
        try:
            patience = source.patience(self._means.silence_s, max(batch.missing.values()))
            async with patience as clock, aclosing(source.source.tiles(list(batch.missing))) as stream:
                async for digest, data in stream:
                    source.heard(len(data))
                    batch.take(digest, data)
                    self._first_came.set()
                    if batch.fresh_bytes >= _HAND_OVER_BYTES or len(batch.fresh) >= self._means.hand_over_blobs:
                        with source.resting(clock):
                            await self._verify(batch, source)
                    if len(batch.fresh) < len(batch.missing) and self._pool.lags(source, batch.lacking):
                        self._hurry.set()
                        raise NoCapacity(f"{source.name} at {source.address} is slow", retry_after_s=0.0)
        except EbbtideError:
            await self._verify(batch, source)
            raise
        await self._verify(batch, source)
        if batch.missing:
            raise Unavailable(f"{source.name} at {source.address} ended before it had sent all")

    async def _verify(self, batch: B, source: OpenSource) -> None:
        """Verify what has come and hand it over. Raises `ChunkCorrupt` for a wrong blob; the others are used."""
        fresh = batch.take_fresh()
        few = sum(map(len, fresh.values())) < _THREAD_BYTES
        good, took = _verified(fresh) if few else await self._means.threads.run(lambda: _verified(fresh))
        self.digests_s += took
        if good:
            self._pool.served()
            await self._hand_over(batch, good, source.name)
        if len(good) < len(fresh):
            raise ChunkCorrupt("a blob came that does not match its digest")

    async def _hand_over(self, batch: B, blobs: dict[bytes, bytes], source: str) -> None:
        for digest in blobs:
            del batch.missing[digest]
        try:
            await self._sink(batch, blobs, source)
        except EbbtideError as error:
            self._failure = error
            raise _SinkFailed from None


def _verified(blobs: dict[bytes, bytes]) -> tuple[dict[bytes, bytes], float]:
    """Return the blobs that match their digests, and the seconds that this took."""
    good: dict[bytes, bytes] = {}
    start = time.perf_counter()
    for digest, data in blobs.items():
        with suppress(ChunkCorrupt):
            check_tile(digest, data)
            good[digest] = data
    return good, time.perf_counter() - start
