"""Fetches blobs from a pool of sources in a few streams at once, and hands each verified one to the caller's sink.

Invariant: a blob reaches the sink only once it matched its digest, and each is handed over once. What the sink took
stays taken, however the fetch ends. A source is blamed for what it sent or left out, never for an error of the sink.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing, suppress
from typing import Final, Generic, TypeVar

from ebbtide.errors import ChunkCorrupt, EbbtideError, NoCapacity, NotReady, Unavailable
from ebbtide.transfer.mirror.digest_threads import DigestThreads
from ebbtide.transfer.sources.source_pool import OpenSource, SourcePool
from ebbtide.transfer.version_finder import FoundVersion
from ebbtide.weights import check_tile

log = logging.getLogger(__name__)

#: Shortest time between two questions for better sources, whatever the upstream says.
_AGAIN_S: Final = 1.0
#: Blobs of a stream, or their bytes, that are verified and handed over at once: enough to be worth waking a thread.
_HAND_OVER_BLOBS: Final = 32
_HAND_OVER_BYTES: Final = 1 << 20
#: Digests of fewer bytes take less time than to wake a thread.
_THREAD_BYTES: Final = 1 << 16


class BlobBatch:
    """Blobs that one stream fetches.

    Invariant: nothing is kept that was not asked for, or has more bytes than it may have.
    """

    def __init__(self, sizes: Mapping[bytes, int]) -> None:
        """`sizes`: by digest, the most bytes that each blob may have; they are asked for in this order."""
        self.missing = dict(sizes)  # until they are verified
        self.lacking: set[str] = set()  # addresses of sources that have not got all of it
        self.fresh: dict[bytes, bytes] = {}  # not verified yet
        self.fresh_bytes = 0

    def take(self, digest: bytes, data: bytes) -> None:
        """Keep what has come under this digest. Raises `ChunkCorrupt` if it was not asked for."""
        if len(data) > self.missing.get(digest, -1) or digest in self.fresh:
            raise ChunkCorrupt(f"a blob of {len(data)} bytes came that was not asked for")
        self.fresh[digest] = data
        self.fresh_bytes += len(data)

    def take_fresh(self) -> dict[bytes, bytes]:
        """What has come since the last time, to be verified."""
        fresh, self.fresh, self.fresh_bytes = self.fresh, {}, 0
        return fresh


B = TypeVar("B", bound=BlobBatch)


class _SinkFailed(Exception):
    """Ends all streams."""


def _ask_again(error: EbbtideError) -> EbbtideError:
    found = f"what was named has been let go since ({error}); ask again"
    return Unavailable(found) if isinstance(error, NotReady) else error


class BlobFetcher(Generic[B]):
    """Fetches some batches once. `digests_s`: seconds that digests took."""

    def __init__(
        self,
        batches: Iterable[B],
        sink: Callable[[B, dict[bytes, bytes], str], Awaitable[None]],
        pool: SourcePool,
        threads: DigestThreads,
        streams: int,
        silence_s: float,
        *,
        hand_over_blobs: int = _HAND_OVER_BLOBS,
        exhausted: Callable[[EbbtideError], EbbtideError] = _ask_again,
        known: Callable[[bytes], bytes | None] = lambda _digest: None,
        on_fault: Callable[[EbbtideError], None] = lambda _error: None,
    ) -> None:
        """`sink` uses verified blobs of a batch, and is told the name of their source; each batch begins with those,
        perhaps none, that are `known` already and have no source. Its errors end the fetch. `threads`: for digests.

        `silence_s`: for how long a source may send nothing, besides what its pauses were so far. `hand_over_blobs`: of
        a stream that are handed over at once. `exhausted`: what to raise when `SourcePool.pick` finds no source.
        `on_fault` is told each error of a source."""
        self._batches, self._unfinished = deque(batches), 0
        self._sink, self._pool, self._threads = sink, pool, threads
        self._most_streams, self._silence_s, self._hand_over_blobs = streams, silence_s, hand_over_blobs
        self._exhausted, self._known, self._on_fault = exhausted, known, on_fault
        self._first_came = asyncio.Event()
        self._hurry = asyncio.Event()  # better sources are wanted
        self._failure: EbbtideError | None = None
        self.digests_s = 0.0

    async def run(self, ask: Callable[[], Awaitable[FoundVersion]], again_s: float) -> None:
        """Fetch all blobs, and meanwhile `ask` for better sources: every `again_s` (0: never), sooner if they are slow.

        Raises what the sink or `exhausted` did; `Unavailable` if a source was closed while it was read.
        """
        renewal = asyncio.create_task(self._renew(ask, again_s))
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(min(self._most_streams, len(self._batches))):
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
                log.info("no better sources of weights: not told (%s)", error)

    async def _stream(self, *, first: bool) -> None:
        """Fetch batch after batch. The other streams begin once the first has got a blob: where a link is so slow that
        one blob takes its time, a blob for each stream would take several times as long."""
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
        known = {digest: data for digest in batch.missing if (data := self._known(digest)) is not None}
        await self._hand_over(batch, known, "")
        while batch.missing and self._failure is None:
            await self._serve(batch)
        self._unfinished -= 1

    async def _serve(self, batch: B) -> None:
        """Have a source send what it can of a batch."""
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
        """Get what is missing of a batch. Raises why not all of it came; what came before is used all the same."""
        try:
            patience = source.patience(self._silence_s, max(batch.missing.values()))
            async with patience as clock, aclosing(source.source.tiles(list(batch.missing))) as stream:
                async for digest, data in stream:
                    source.heard(len(data))
                    batch.take(digest, data)
                    self._first_came.set()
                    if batch.fresh_bytes >= _HAND_OVER_BYTES or len(batch.fresh) >= self._hand_over_blobs:
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
        """Verify what has come, and hand it over. Raises `ChunkCorrupt` for a blob that is not what its digest says;
        the others are used."""
        fresh = batch.take_fresh()
        few = sum(map(len, fresh.values())) < _THREAD_BYTES
        good, took = _verified(fresh) if few else await self._threads.run(lambda: _verified(fresh))
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
    """Those that match their digests, and the seconds that it took to tell."""
    good: dict[bytes, bytes] = {}
    start = time.perf_counter()
    for digest, data in blobs.items():
        with suppress(ChunkCorrupt):
            check_tile(digest, data)
            good[digest] = data
    return good, time.perf_counter() - start
