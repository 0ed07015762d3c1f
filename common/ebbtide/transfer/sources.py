"""Opens sources of blobs, measures how fast they send, and chooses among them.

No source is trusted: the puller checks what it sends.
"""

import asyncio
import logging
import math
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Final, Protocol, TypeAlias

from ebbtide.auth.security import ClientSecurity
from ebbtide.errors import EbbtideError, InvalidRequest, NoCapacity, NotReady, Unavailable
from ebbtide.rpc.channel import open_channel
from ebbtide.rpc.status_table import translated
from ebbtide.transfer.version_finder import FoundVersion
from ebbtide.types.weights import FAR, BlobSource, Holder, distance
from ebbtide.v1 import weights_pb2 as pb
from ebbtide.v1.weights_pb2_grpc import WeightsStub

#: Time of waiting over which the latest rate is taken.
LONG_S: Final = 5.0
#: Fewer bytes measure a link's delay, not its rate.
_MANY_BYTES: Final = 1 << 20


class PaceWatch:
    """Sums the seconds between its starts and stops."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._before = 0.0

    def start(self, now: float) -> None:
        self._since = now

    def stop(self, now: float) -> None:
        self._before, self._since = self.seconds(now), None

    def seconds(self, now: float) -> float:
        return self._before + (0.0 if self._since is None else now - self._since)


class SourcePace:
    """Measures how fast a source sends.

    Invariant: a source counts as slow only by the time in which a stream waited for it. Its rate counts all the time in
    which it was read, its readers' own work included. So neither figure flatters the source that is preferred.

    `reading` runs while a source has streams, `waiting` while one of them waits for it.
    """

    def __init__(self) -> None:
        self.reading, self.waiting = PaceWatch(), PaceWatch()
        self.bytes_per_s = 0.0  # over all reading; 0: not known
        self.lately = math.inf  # bytes/s over the last `LONG_S` of waiting
        self._bytes = 0
        self._marked = 0.0, 0  # the waiting and the bytes when `lately` was last computed

    def came(self, size: int, now: float) -> None:
        """Count bytes that have come."""
        self._bytes += size
        if self._bytes >= _MANY_BYTES and (seconds := self.reading.seconds(now)):
            self.bytes_per_s = self._bytes / seconds
        waited, (since, before) = self.waiting.seconds(now), self._marked
        if waited - since >= LONG_S:
            self.lately = (self._bytes - before) / (waited - since)
            self._marked = waited, self._bytes

    def forget(self) -> None:
        """Drop the latest rate."""
        self.lately = math.inf


_PEER: Final = re.compile(r"(?:(?P<name>[A-Za-z0-9_.-]{1,253})|\[[0-9A-Fa-f:.]{2,45}\]):(?P<port>[0-9]{1,5})")
#: Prefixes that gRPC reads as another kind of address, although they look like a host's name.
_SCHEMES: Final = frozenset({"unix", "unix-abstract", "dns", "ipv4", "ipv6", "vsock", "xds", "google-c2p"})


class TileSource(Protocol):
    """Streams blobs, in several streams at once if asked."""

    def tiles(self, digests: Sequence[bytes]) -> AsyncGenerator[tuple[bytes, bytes], None]:
        """Yield digest and data of blobs, in any order. Raises `Unavailable` when it breaks, `VersionUnavailable` if it
        lacks one of them."""
        ...

    async def close(self) -> None: ...


#: Opens a source for a reader.
Opener: TypeAlias = Callable[[BlobSource, Holder], TileSource]


class GrpcSource:
    """A Weights service: a relay, or a peer."""

    def __init__(
        self, stub: WeightsStub, target: str, reader: Holder, channel: "Closable | None" = None, *, run_id: str = ""
    ) -> None:
        """`channel` is closed with it, if given. `run_id`: the run of all blobs asked for, if it is known."""
        self._stub, self._target, self._reader, self._channel = stub, target, reader, channel
        self._run_id = run_id
        self._closed = False

    async def tiles(self, digests: Sequence[bytes]) -> AsyncGenerator[tuple[bytes, bytes], None]:
        if self._closed:
            raise Unavailable(f"source of weights at {self._target} was closed")
        reader = self._reader
        request = pb.FetchTilesRequest(digests=digests, reader=reader.name, site=reader.site, run_id=self._run_id)
        call = self._stub.FetchTiles(request)
        try:
            with translated("source of weights", self._target):
                async for tile in call:
                    yield tile.digest, tile.data
        finally:
            call.cancel()

    async def close(self) -> None:
        self._closed = True
        if self._channel is not None:
            await self._channel.close()


class Closable(Protocol):
    async def close(self) -> None: ...


def check_peer(address: str, *, field: str) -> str:
    """Return `address` if it is the host:port of a service, and no other address that gRPC understands; raise
    `InvalidRequest` naming `field` otherwise. One caller's address may be given to a whole fleet."""
    found = _PEER.fullmatch(address)
    if found is None or int(found["port"]) >= 1 << 16 or (found["name"] or "").lower() in _SCHEMES:
        raise InvalidRequest(f"{address!r} is no address of a peer: give host:port", field=field)
    return address


def opener(security: ClientSecurity) -> Opener:
    """Return an opener: of static copies by URL if the relay names them so, and of holders by host:port.

    Before it connects, the opener raises `InvalidRequest` for any other address, and `NotReady` for a holder that must
    not see the token."""

    def open_source(source: BlobSource, reader: Holder) -> TileSource:
        if source.static:
            return _static_copy(source.address)
        address = check_peer(source.address, field="address")
        security.check_peers()
        channel = open_channel(address, security)
        return GrpcSource(WeightsStub(channel), source.address, reader, channel)

    return open_source


def _static_copy(url: str) -> TileSource:
    if not url.startswith(("http://", "https://")):
        raise InvalidRequest(f"{url!r} is no URL of a static copy: give http:// or https://", field="address")
    try:
        from ebbtide.transfer.static_source import StaticSource
    except ImportError:
        raise NotReady("static copies are read with aiohttp, which is not installed: pip install aiohttp") from None
    return StaticSource(url)


log = logging.getLogger(__name__)

#: A source may be silent for this many times its longest pause so far, besides the allowed silence.
_PAUSES: Final = 4.0
#: Slowest rate at which a first blob may come. A slower source counts as dead.
_FIRST_BYTES_PER_S: Final = 1 << 16
_LONGEST_S: Final = 60.0
#: Bounds of the wait that a busy source asks for.
_SHORTEST_WAIT_S: Final = 0.05
_LONGEST_WAIT_S: Final = 2.0
#: How long near sources may be busy before a farther one is asked.
_BUSY_S: Final = 20.0
#: A source below this rate, or so many times slower than others, is passed over for a while.
_SLOW_BYTES_PER_S: Final = 1 << 16
_SLOWER: Final = 8.0
_SLOW_S: Final = 30.0
#: The tier of a source that comes last.
UNLISTED: Final = FAR + 1


class OpenSource:
    """A source in use. `tier`: its distance from the reader, or `UNLISTED`."""

    def __init__(self, source: TileSource, name: str, address: str, tier: int) -> None:
        self.source, self.name, self.address, self.tier = source, name, address, tier
        self.streams = 0
        self.pace = SourcePace()
        #: Of the streams that wait: the silence that they allow, and the largest blob that they wait for.
        self._clocks: dict[asyncio.Timeout, tuple[float, int]] = {}
        self._heard = 0.0
        self._pause = 0.0
        self._largest = 0

    @asynccontextmanager
    async def patience(self, silence_s: float, largest: int) -> AsyncIterator[asyncio.Timeout]:
        """End the block with `Unavailable` when the source was silent, in all its streams, for `silence_s` plus the
        length of its pauses so far, or the time that a first blob of `largest` bytes may take."""
        clock, loop = asyncio.timeout(None), asyncio.get_running_loop()
        if not self.streams:
            self.pace.reading.start(loop.time())
        self.streams += 1
        try:
            async with clock:
                self._wait(clock, (silence_s, largest))
                yield clock
        except TimeoutError:
            raise Unavailable(f"{self.name} at {self.address} has stalled") from None
        finally:
            self._rest(clock)
            self.streams -= 1
            if not self.streams:
                self.pace.reading.stop(loop.time())

    @contextmanager
    def resting(self, clock: asyncio.Timeout) -> Iterator[None]:
        """Stop the `clock` of a stream (from `patience`) while its reader does other work."""
        allowed = self._rest(clock)
        if not clock.expired():
            clock.reschedule(None)
        try:
            yield
        finally:
            if allowed is not None:
                self._wait(clock, allowed)

    def _wait(self, clock: asyncio.Timeout, allowed: tuple[float, int]) -> None:
        now = asyncio.get_running_loop().time()
        if not self._clocks:
            self._heard = now  # the time to the first blob is a pause, too
            self.pace.waiting.start(now)
        self._clocks[clock] = allowed
        self._wind(clock)

    def _rest(self, clock: asyncio.Timeout) -> tuple[float, int] | None:
        allowed = self._clocks.pop(clock, None)
        if allowed is not None and not self._clocks:
            self.pace.waiting.stop(asyncio.get_running_loop().time())
        return allowed

    def heard(self, size: int) -> None:
        """Count a blob of `size` bytes that has come."""
        now = asyncio.get_running_loop().time()
        self._pause = max(self._pause, now - self._heard)
        self._heard = now
        self._largest = max(self._largest, size)
        self.pace.came(size, now)
        for clock in self._clocks:
            self._wind(clock)

    def _wind(self, clock: asyncio.Timeout) -> None:
        if not clock.expired():
            silence_s, largest = self._clocks[clock]
            pause_s = min(_LONGEST_S, self._usual(largest))
            clock.reschedule(asyncio.get_running_loop().time() + silence_s + pause_s)

    def _usual(self, largest: int) -> float:
        if not self._largest:
            return largest / _FIRST_BYTES_PER_S
        return _PAUSES * self._pause * max(1.0, largest / self._largest)


class SourcePool:
    """Chooses the source for each batch of one pull.

    Invariant: only the nearest sources that have not failed are asked, each time the one with the fewest streams. A
    farther one is asked only when all nearer ones have failed, were busy for long, or are far slower. The relay comes
    last if it is not listed. A source that failed is asked again only if the relay names it in an answer to a later
    request.
    """

    def __init__(
        self, relay: OpenSource, open_source: Opener, reader: Holder, rates: dict[int, float] | None = None
    ) -> None:
        """`rates`: bytes/s of each tier in former pulls. This pull adds its own when it ends."""
        self._relay, self._open_source, self._reader = relay, open_source, reader
        self._rates = {} if rates is None else rates
        self._listed: list[BlobSource] = []
        self._open: dict[str, OpenSource] = {}
        self._failed: dict[str, EbbtideError] = {}
        self._busy: dict[str, float] = {}  # until when
        self._slow: dict[str, float] = {}  # until when
        self._waiting_since: float | None = None
        self._closed: list[OpenSource] = []

    @property
    def failed(self) -> tuple[str, ...]:
        """Addresses that broke, stalled or lied since the relay last named sources. Lacking blobs does not count."""
        return tuple(at for at, error in self._failed.items() if not isinstance(error, NotReady))

    @property
    def dropped(self) -> tuple[str, ...]:
        """Addresses that are not asked until the relay names them again."""
        return tuple(self._failed)

    async def ask(self, find: Callable[[], Awaitable[FoundVersion]]) -> FoundVersion:
        """Renew the sources by the relay's answer to `find`, which reports those that `failed`, and close the dropped
        ones. Raises as `find`."""
        dropped = self.dropped
        found = await find()
        self.renew(found.sources, dropped)
        await self.close_dropped()
        return found

    def renew(self, sources: Sequence[BlobSource], dropped: Collection[str] | None = None) -> None:
        """Use the sources that the relay names, best first. `dropped`: those at the time of the request (None: all)."""
        self._listed = list(sources)
        for address in self.dropped if dropped is None else dropped:
            self._failed.pop(address, None)

    def pick(self, without: Collection[str] = ()) -> OpenSource:
        """The source to ask next, without some addresses. Raises if none is left: the relay's own error, or
        `Unavailable` if the relay only lacks the blobs."""
        found = self._alive(without)
        free = [source for source in found if not self._busy_for(source)]
        if all(self._is_slow(source) for source in free) and self._is_free(self._relay, without):
            free = [*free, self._relay]
        if not free and found:
            wait = min(self._busy_for(source) for source in found)
            raise NoCapacity("all sources of weights are busy", retry_after_s=wait)
        if not free and self._failed:
            raise self._failed.get(self._relay.address) or Unavailable("all others that had it have failed")
        if not free:
            raise NotReady("no source of weights has what is wanted of it")
        swift = [source for source in free if not self._is_slow(source)] or free
        nearest = min(source.tier for source in swift)
        return min((source for source in swift if source.tier == nearest), key=lambda source: source.streams)

    def busy_s(self, without: Collection[str] = ()) -> float:
        """Seconds to wait before `pick` while all near sources are busy; 0 after `_BUSY_S`, to ask a farther one."""
        found = [source for source in self._alive(without) if not self._is_slow(source)]
        nearest = min((source.tier for source in found), default=0)
        wait = min((self._busy_for(source) for source in found if source.tier == nearest), default=0.0)
        if not wait:
            return 0.0
        now = time.monotonic()
        self._waiting_since = self._waiting_since or now
        return wait if now - self._waiting_since < _BUSY_S else 0.0

    def served(self) -> None:
        """Note that a source has sent a blob."""
        self._waiting_since = None

    def lags(self, source: OpenSource, without: Collection[str] = ()) -> bool:
        """Whether a source is so slow that others, no nearer than it, should be asked instead; without some addresses.

        Farther sources are also compared by their rates in former pulls. Nearer ones are not: a neighbour that still
        fetches over a slow link is as fast as that link, and no slower than a reader that crosses it again.
        """
        others = {one.address: one for one in (*self._alive(without), self._relay)}
        rivals = [
            one
            for one in others.values()
            if one is not source and self._is_free(one, without) and not self._is_slow(one) and one.tier >= source.tier
        ]
        if rivals and not self._is_slow(source):
            rates = [one.pace.bytes_per_s for one in rivals]
            rates += [self._rates.get(one.tier, 0.0) for one in rivals if one.tier > source.tier]
            if source.pace.lately < max(_SLOW_BYTES_PER_S, max(rates) / _SLOWER):
                log.warning("source of weights is slow: %s at %s", source.name, source.address)
                self._slow[source.address] = time.monotonic() + _SLOW_S
                source.pace.forget()
        return bool(rivals) and self._is_slow(source)

    def _is_slow(self, source: OpenSource) -> bool:
        return self._slow.get(source.address, 0.0) > time.monotonic()

    def _is_free(self, source: OpenSource, without: Collection[str]) -> bool:
        return self._is_alive(source, without) and not self._busy_for(source)

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
    def blaming(
        self, source: OpenSource, lacking: set[str], on_fault: Callable[[EbbtideError], None]
    ) -> Iterator[None]:
        """Blame the source for any error in the block: report it to `on_fault` and drop the source. A source that only
        lacks the blobs is added to `lacking` instead, since it may have others."""
        try:
            yield
        except EbbtideError as error:
            on_fault(error)
            if isinstance(error, NotReady):
                lacking.add(source.address)
            else:
                self.drop(source, error)

    def drop(self, source: OpenSource, error: EbbtideError) -> None:
        """Drop a source that has failed; pass over a busy one for a while."""
        if isinstance(error, NoCapacity):
            wait = min(_LONGEST_WAIT_S, max(_SHORTEST_WAIT_S, error.retry_after_s))
            self._busy[source.address] = time.monotonic() + wait
            return
        if source is not self._relay:
            if self._open.get(source.address) is not source:
                return  # another of its streams has dropped it
            self._closed.append(self._open.pop(source.address))
        log.warning("source of weights dropped: %s at %s (%s)", source.name, source.address, error)
        self._failed[source.address] = error

    async def close_dropped(self) -> None:
        """Close the failed sources that have no more streams. If it is cancelled, `close` closes the rest."""
        while idle := next((source for source in self._closed if not source.streams), None):
            self._closed.remove(idle)
            try:
                await idle.source.close()
            except asyncio.CancelledError:
                self._closed.append(idle)
                raise

    async def close(self) -> None:
        opened = *self._open.values(), *self._closed
        for source in (*opened, self._relay):
            if source.pace.bytes_per_s:
                self._rates[source.tier] = source.pace.bytes_per_s
        for source in opened:
            await source.source.close()
