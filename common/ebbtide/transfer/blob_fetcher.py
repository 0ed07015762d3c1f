"""Fetches blobs from a pool of sources in a few streams at once, and hands each verified one to the caller's sink.

Invariant: a blob reaches the sink only once it matched its digest, and each is handed over once. Blobs in memory are at
most what one hand-over takes for each stream, besides what the sink keeps. What the sink took stays taken, however the
fetch ends. A source is blamed for what it sent or left out, never for what the sink does with it.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing, suppress
from typing import Final, Generic, Protocol, TypeVar

from msgspec import Struct

from ebbtide.errors import ChunkCorrupt, EbbtideError, NoCapacity, Unavailable
from ebbtide.transfer.mirror.digest_threads import DigestThreads
from ebbtide.transfer.sources.source_pool import OpenSource, SourcePool
from ebbtide.transfer.version_finder import FoundVersion
from ebbtide.weights import check_tile

log = logging.getLogger(__name__)

#: Shortest time between two questions for better sources, whatever the upstream says.
_AGAIN_S: Final = 1.0
#: Digests of fewer bytes take less time than to wake a thread.
_THREAD_BYTES: Final = 1 << 16


class BlobBatch:
    """Blobs that one stream fetches.

    Invariant: nothing is kept that was not asked for, or has more bytes than the lists say.
    """

    def __init__(self, sizes: Mapping[bytes, int]) -> None:
        """`sizes`: by digest, the most bytes that each blob may have; they are asked for in this order."""
        self._sizes = sizes
        self._fresh: dict[bytes, bytes] = {}  # not verified yet
        self.fresh_bytes = 0
        #: Still to be fetched.
        self.missing = dict(sizes)
        #: Addresses of sources that have not got all of it.
        self.lacking: set[str] = set()

    @property
    def fresh_blobs(self) -> int:
        return len(self._fresh)

    @property
    def whole(self) -> bool:
        """Whether all blobs have come and were verified."""
        return not self.missing and not self._fresh

    def take(self, digest: bytes, data: bytes) -> None:
        """Keep what has come under this digest. Raises `ChunkCorrupt` if it was not asked for."""
        if len(data) > self.missing.get(digest, -1):
            raise ChunkCorrupt(f"a blob of {len(data)} bytes came that was not asked for")
        del self.missing[digest]
        self._fresh[digest] = data
        self.fresh_bytes += len(data)

    def take_fresh(self) -> dict[bytes, bytes]:
        """What has come since the last time, to be verified."""
        fresh, self._fresh, self.fresh_bytes = self._fresh, {}, 0
        return fresh

    def want_again(self, digests: Iterable[bytes]) -> None:
        """What came under these digests was wrong."""
        self.missing |= {digest: self._sizes[digest] for digest in digests}


B = TypeVar("B", bound=BlobBatch)
B_contra = TypeVar("B_contra", bound=BlobBatch, contravariant=True)


class BlobSink(Protocol[B_contra]):
    async def take(self, batch: B_contra, blobs: dict[bytes, bytes], source: str, /) -> None:
        """Use verified blobs of a batch, several batches at once. An error ends the fetch and blames no source.

        `source`: the name of the one that sent them; empty for the blobs that were known when the batch began, perhaps
        none, with which this is called first.
        """
        ...


class FetchLimits(Struct, frozen=True, kw_only=True):
    streams: int
    #: For how long a source may send nothing, besides what its pauses were so far.
    silence_s: float
    #: Blobs are handed over as soon as so many bytes, or blobs, of a stream have come.
    hand_over_bytes: int
    hand_over_blobs: int


class SourcesExhausted(Exception):
    """No source is left for some blobs; `error` says why: see `SourcePool.pick`."""

    def __init__(self, error: EbbtideError) -> None:
        super().__init__(str(error))
        self.error = error


class _SinkFailed(Exception):
    def __init__(self, error: EbbtideError) -> None:
        self.error = error


class BlobFetcher(Generic[B]):
    """Fetches some batches once."""

    def __init__(
        self,
        batches: Iterable[B],
        sink: BlobSink[B],
        pool: SourcePool,
        threads: DigestThreads,
        limits: FetchLimits,
        *,
        known: Callable[[bytes], bytes | None] = lambda _digest: None,
        on_fault: Callable[[EbbtideError], None] = lambda _error: None,
    ) -> None:
        """`threads`: for digests. `known`: verified blobs that need not be fetched. `on_fault`: is told each error of a
        source."""
        self._batches = deque(batches)
        self._sink, self._pool, self._threads, self._limits = sink, pool, threads, limits
        self._known, self._on_fault = known, on_fault
        self._unfinished = len(self._batches)
        self._streams: list[asyncio.Task[None]] = []
        self._first_came = asyncio.Event()
        self._hurry = asyncio.Event()  # better sources are wanted
        self._failure: EbbtideError | SourcesExhausted | None = None
        #: Seconds that digests took.
        self.digests_s = 0.0

    async def run(self, ask: Callable[[], Awaitable[FoundVersion]], again_s: float) -> None:
        """Fetch all blobs, and meanwhile `ask` for better sources: every `again_s` (0: never), sooner if they are slow.

        Raises what the sink raised; `SourcesExhausted`; `Unavailable` if a source was closed while it was read.
        """
        renewal = asyncio.create_task(self._renew(ask, again_s))
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(min(self._limits.streams, len(self._batches))):
                    self._streams.append(group.create_task(self._stream(first=not number)))
        finally:
            renewal.cancel()
            await asyncio.gather(renewal, return_exceptions=True)
        if self._failure is not None:
            raise self._failure
        if self._unfinished:
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
        except _SinkFailed as failed:
            self._failure = failed.error
            for stream in self._streams:
                if stream is not asyncio.current_task():
                    stream.cancel()
        finally:
            self._first_came.set()

    async def _fetch(self, batch: B) -> None:
        """Fetch a batch from one source after another until it is whole."""
        known = {digest: data for digest in batch.missing if (data := self._known(digest)) is not None}
        for digest in known:
            del batch.missing[digest]
        await self._hand_over(batch, known, "")
        while batch.missing and self._failure is None:
            await self._serve(batch)
        self._unfinished -= batch.whole

    async def _serve(self, batch: B) -> None:
        """Have a source send what it can of a batch."""
        while wait := self._pool.busy_s(batch.lacking):
            self._hurry.set()  # the upstream may know of others by now
            await asyncio.sleep(wait)
        try:
            source = self._pool.pick(batch.lacking)
        except EbbtideError as error:
            self._failure = SourcesExhausted(error)
            return
        with self._pool.blaming(source, batch.lacking, self._on_fault):
            await self._read(source, batch)

    async def _read(self, source: OpenSource, batch: B) -> None:
        """Get what is missing of a batch. Raises why not all of it came; what came before is used all the same."""
        limits, missing = self._limits, list(batch.missing)
        try:
            patience = source.patience(limits.silence_s, max(batch.missing.values()))
            async with patience as clock, aclosing(source.source.tiles(missing)) as stream:
                async for digest, data in stream:
                    source.heard(limits.silence_s, len(data))
                    batch.take(digest, data)
                    self._first_came.set()
                    if batch.fresh_bytes >= limits.hand_over_bytes or batch.fresh_blobs >= limits.hand_over_blobs:
                        with source.resting(clock, limits.silence_s):
                            await self._verify(batch, source)
                    if batch.missing and self._pool.lags(source, batch.lacking):
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
        size, fresh = batch.fresh_bytes, batch.take_fresh()
        if not fresh:
            return
        good, took = _verified(fresh) if size < _THREAD_BYTES else await self._threads.run(lambda: _verified(fresh))
        self.digests_s += took
        batch.want_again(fresh.keys() - good.keys())
        if good:
            self._pool.served()
            await self._hand_over(batch, good, source.name)
        if len(good) < len(fresh):
            raise ChunkCorrupt("a blob came that does not match its digest")

    async def _hand_over(self, batch: B, blobs: dict[bytes, bytes], source: str) -> None:
        try:
            await self._sink.take(batch, blobs, source)
        except EbbtideError as error:
            raise _SinkFailed(error) from None


def _verified(blobs: dict[bytes, bytes]) -> tuple[dict[bytes, bytes], float]:
    """Those that match their digests, and the seconds that it took to tell."""
    good: dict[bytes, bytes] = {}
    start = time.perf_counter()
    for digest, data in blobs.items():
        with suppress(ChunkCorrupt):
            check_tile(digest, data)
            good[digest] = data
    return good, time.perf_counter() - start
