"""The sources of one pull, and which of them is asked next.

Invariant: of those that have not failed only the nearest are asked, each time the one with the fewest streams: so that
nothing comes from far that is near, until all that is near has failed, or was busy for long. The relay comes last if it
was not listed. A source that failed is asked again only if the relay names it again in a later answer.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from ebbtide.errors import EbbtideError, NoCapacity, NotReady, Unavailable
from ebbtide.transfer.sources import Opener, Source
from ebbtide.types.weights import FAR, BlobSource, Holder, distance

log = logging.getLogger(__name__)

#: A source may be silent for this many times its longest pause so far, on top of the patience with silence.
_PAUSES: Final = 4.0
#: Slowest rate at which a first blob may come: below it, a source is taken for dead.
_FIRST_BYTES_PER_S: Final = 1 << 16
_LONGEST_S: Final = 60.0
#: A source that is busy is asked again after what it says, within these bounds.
_SHORTEST_WAIT_S: Final = 0.05
_LONGEST_WAIT_S: Final = 2.0
#: So long is waited for what is near and busy before what is far is asked.
_BUSY_S: Final = 20.0
#: The tier of what comes last.
UNLISTED: Final = FAR + 1


class OpenSource:
    """A source in use. `tier`: its distance from the reader; `UNLISTED`: the relay, which was not listed."""

    def __init__(self, source: Source, name: str, address: str, tier: int) -> None:
        self.source, self.name, self.address, self.tier = source, name, address, tier
        self.streams = 0
        self._clocks: dict[asyncio.Timeout, int] = {}  # and the largest blob that their streams wait for
        self._heard: float | None = None
        self._pause = 0.0
        self._largest = 0

    @asynccontextmanager
    async def patience(self, silence_s: float, largest: int) -> AsyncIterator[None]:
        """Ends the block with `Unavailable` when nothing has come from the source, in this stream or another, for
        `silence_s` and some more: as long as its pauses were so far, or as a first blob of `largest` bytes may take."""
        clock = asyncio.timeout(None)
        self.streams += 1
        if self._heard is None:
            self._heard = asyncio.get_running_loop().time()  # the way to the first blob is a pause, too
        try:
            async with clock:
                self._clocks[clock] = largest
                self._wind(clock, silence_s)
                yield
        except TimeoutError:
            raise Unavailable(f"{self.name} at {self.address} has stalled") from None
        finally:
            self.streams -= 1
            self._clocks.pop(clock, None)
            if not self._clocks:
                self._heard = None

    def heard(self, silence_s: float, size: int = 0) -> None:
        """A blob of `size` bytes has come."""
        now = asyncio.get_running_loop().time()
        if self._heard is not None:
            self._pause = max(self._pause, now - self._heard)
        self._heard = now
        self._largest = max(self._largest, size)
        for clock in self._clocks:
            self._wind(clock, silence_s)

    def _wind(self, clock: asyncio.Timeout, silence_s: float) -> None:
        if not clock.expired():
            allowed = min(_LONGEST_S, self._usual(self._clocks[clock]))
            clock.reschedule(asyncio.get_running_loop().time() + silence_s + allowed)

    def _usual(self, largest: int) -> float:
        if not self._largest:
            return largest / _FIRST_BYTES_PER_S
        return _PAUSES * self._pause * max(1.0, largest / self._largest)


class Pool:
    def __init__(self, relay: OpenSource, open_source: Opener, reader: Holder) -> None:
        self._relay, self._open_source, self._reader = relay, open_source, reader
        self._listed: list[BlobSource] = []
        self._open: dict[str, OpenSource] = {}
        self._failed: dict[str, EbbtideError] = {}
        self._busy: dict[str, float] = {}  # until when
        self._waiting_since: float | None = None
        self._closed: list[OpenSource] = []

    @property
    def failed(self) -> tuple[str, ...]:
        """Addresses that broke, stalled or lied since the relay last named its sources; not those that merely had not
        got what was asked of them."""
        return tuple(at for at, error in self._failed.items() if not isinstance(error, NotReady))

    def renew(self, sources: Sequence[BlobSource]) -> None:
        """What the relay names now, best first."""
        self._listed = list(sources)
        self._failed = {}

    def pick(self, without: Collection[str] = ()) -> OpenSource:
        """Whom to ask next, but for some addresses. Raises the error of the last one to fail when none is left."""
        found = self._alive(without)
        free = [source for source in found if not self._busy_for(source)]
        if not free and self._is_alive(self._relay, without) and not self._busy_for(self._relay):
            free = [self._relay]
        if not free and found:
            wait = min(self._busy_for(source) for source in found)
            raise NoCapacity("all sources of weights are busy", retry_after_s=wait)
        if not free and self._failed:
            raise list(self._failed.values())[-1]
        if not free:
            raise NotReady("no source of weights has what is wanted of it")
        nearest = min(source.tier for source in free)
        return min((source for source in free if source.tier == nearest), key=lambda source: source.streams)

    def busy_s(self, without: Collection[str] = ()) -> float:
        """For how many seconds to wait before `pick`, since all that is near is busy: not for ever, but rather than ask
        what is far."""
        found = self._alive(without)
        nearest = min((source.tier for source in found), default=0)
        wait = min((self._busy_for(source) for source in found if source.tier == nearest), default=0.0)
        if not wait:
            return 0.0
        now = time.monotonic()
        self._waiting_since = self._waiting_since or now
        return wait if now - self._waiting_since < _BUSY_S else 0.0

    def served(self) -> None:
        """Somebody has sent something."""
        self._waiting_since = None

    def _busy_for(self, source: OpenSource) -> float:
        return max(0.0, self._busy.get(source.address, 0.0) - time.monotonic())

    def _alive(self, without: Collection[str]) -> list[OpenSource]:
        listed = [source for one in self._listed if (source := self._ready(one)) is not None]
        found = [source for source in listed if source.address not in without]
        return found or ([self._relay] if self._is_alive(self._relay, without) else [])

    def _is_alive(self, source: OpenSource, without: Collection[str]) -> bool:
        return source.address not in self._failed and source.address not in without

    def _ready(self, listed: BlobSource) -> OpenSource | None:
        address = listed.address or self._relay.address
        if address in self._failed:
            return None
        if address == self._relay.address:
            self._relay.tier = distance(listed, self._reader)
            return self._relay
        if address not in self._open:
            try:
                source = self._open_source(listed, self._reader)
            except EbbtideError as error:
                self._failed[address] = error
                return None
            self._open[address] = OpenSource(source, listed.name, address, distance(listed, self._reader))
        return self._open[address]

    @contextmanager
    def blaming(self, source: OpenSource, lacking: set[str]) -> Iterator[None]:
        """Whatever error the source answers with is its own: it is dropped for it, and others go on. What it has not
        got makes it one of `lacking`, since it may well have other blobs."""
        try:
            yield
        except NotReady:
            lacking.add(source.address)
        except EbbtideError as error:
            self.drop(source, error)

    def drop(self, source: OpenSource, error: EbbtideError) -> None:
        """It has failed; or it is busy, which passes."""
        if isinstance(error, NoCapacity):
            wait = min(_LONGEST_WAIT_S, max(_SHORTEST_WAIT_S, error.retry_after_s))
            self._busy[source.address] = time.monotonic() + wait
            return
        log.warning("source of weights dropped: %s at %s (%s)", source.name, source.address, error)
        self._failed[source.address] = error
        if (gone := self._open.pop(source.address, None)) is not None:
            self._closed.append(gone)

    async def close(self) -> None:
        for source in (*self._open.values(), *self._closed):
            await source.source.close()
