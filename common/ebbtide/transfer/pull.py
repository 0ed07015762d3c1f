"""One pull: rounds of asking for ways, planning, and fetching in a few streams at once.

Invariant: a blob is used only once it matched its digest, a tile is written only once it matched the manifest's; blobs
in memory are at most a batch for each stream. Nothing of a round outlives it but what the mirror holds and what failed,
so any error may end one, and the next begins from what is there.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import ExitStack, aclosing, nullcontext, suppress
from typing import Final, TypeVar

from msgspec import Struct, field

from ebbtide.errors import (
    ChunkCorrupt,
    EbbtideError,
    InvalidRequest,
    NotReady,
    PermissionDenied,
    Unavailable,
    VersionUnavailable,
)
from ebbtide.transfer.batches import Batch, Work
from ebbtide.transfer.cache import BlobCache
from ebbtide.transfer.changes import Changes
from ebbtide.transfer.finding import Finder, Found, Question, is_usable
from ebbtide.transfer.mirror import Mirror
from ebbtide.transfer.pool import OpenSource, Pool
from ebbtide.transfer.sources import Opener
from ebbtide.types.weights import FoundWay, Holder, Manifest
from ebbtide.weights import Place, TileTask, Way, check_tile, places

T = TypeVar("T")
#: Blobs and tiles after which what has come is verified and applied: what a thread is worth being woken for.
_SETTLE_BYTES: Final = 1 << 20
_SETTLE_BLOBS: Final = 32
#: Shortest time between two questions for better sources, whatever the relay says.
_AGAIN_S: Final = 1.0


class Order(Struct, frozen=True):
    """What is wanted. `wanted`: some places, or None for all."""

    target: Manifest
    mirror: Mirror
    publisher: bytes
    wanted: tuple[Place, ...] | None
    changes: Changes | None


class Tally(Struct):
    bytes_by_source: dict[str, int] = field(default_factory=dict)
    tiles: int = 0
    reused: int = -1
    digests_s: float = 0.0


class Pull:
    def __init__(
        self,
        order: Order,
        finder: Finder,
        relay: OpenSource,
        open_source: Opener,
        reader: Holder,
        *,
        threads: Executor,
        cache: BlobCache | None,
        streams: int,
        silence_s: float,
        bytes_per_s: float,
    ) -> None:
        self.tally = Tally()
        self.ways: list[FoundWay] = []
        self._order, self._finder, self._threads, self._cache = order, finder, threads, cache
        self._streams, self._silence_s, self._bytes_per_s = streams, silence_s, bytes_per_s
        self._pool = Pool(relay, open_source, reader)
        self._lists: dict[FoundWay, Way] = {}
        self._refused: set[FoundWay] = set()
        self._scratch = False
        self._batches: deque[Batch] = deque()
        self._broken: list[Place] = []
        self._failure: EbbtideError | None = None
        self._hurry = asyncio.Event()
        self._going = asyncio.Event()

    async def close(self) -> None:
        await self._pool.close()

    async def round(self) -> None:
        """Ask, plan and fetch once. Raises why not all is there; what has been done is kept."""
        order, version = self._order, self._order.target.version
        have = order.mirror.versions(order.target.run_id, version.policy)
        await self._in_thread(order.mirror.mend)
        with ExitStack() as peers:
            with self._cache.planning() if self._cache is not None else nullcontext():
                found = await self._ask(have)  # from here on, peers may be told to come to us
                work = await self._plan(found, have, await self._in_thread(order.mirror.held))
                if self._cache is not None:
                    peers.enter_context(self._cache.arriving(work.sizes))
            if self.tally.reused < 0:
                self.tally.reused = self._count() - work.tiles
            order.mirror.remember(order.target.run_id, version.policy, [*have, version.version])
            await self._fetch(work, found.again_s)
        if order.wanted is None:
            order.mirror.remember(order.target.run_id, version.policy, [version.version])
            with suppress(EbbtideError):  # it hears of it when this holder tells it that it serves, or installs
                await self._finder.find(self._question([version.version], done=True))

    # -- where it comes from -------------------------------------------------------------------------------------

    def _question(self, have: list[int], *, done: bool = False) -> Question:
        target = self._order.target
        return Question(
            run_id=target.run_id,
            policy=target.version.policy,
            version=target.version.version,
            have=tuple(have),
            bytes_per_s=self._bytes_per_s,
            failed=self._pool.failed,
            done=done,
            scratch=self._scratch and not done,
        )

    async def _ask(self, have: list[int]) -> Found:
        found = await self._finder.find(self._question(have))
        self._pool.renew(found.sources)
        return found

    async def _plan(self, found: Found, have: list[int], held: dict[Place, bytes]) -> Work:
        """The work along the first ways that lead everywhere. Raises `VersionUnavailable` if none do."""
        order = self._order
        wanted = list(places(order.target)) if order.wanted is None else list(order.wanted)
        ways: list[Way] = []
        work = await self._in_thread(lambda: Work(order.target, ways, wanted, held))
        kind = ChunkCorrupt if self._refused else VersionUnavailable
        failure: EbbtideError = kind(f"{len(work.lost)} tiles cannot be had: no way is known that leads to them")
        while work.lost:
            for way in found.ways:
                if way in self._refused or not is_usable(way, have):
                    continue
                try:
                    ways.append(await self._way(way))
                except (InvalidRequest, ChunkCorrupt, PermissionDenied, NotReady) as error:
                    failure = error
                    continue
                work = await self._in_thread(lambda: Work(order.target, ways, wanted, held))
                if not work.lost:
                    return work
            if self._scratch:
                raise failure
            self._scratch = True  # what is held is not all of what it was: ask for ways from anywhere
            found = await self._ask(have)
        return work

    async def _way(self, found: FoundWay) -> Way:
        if found not in self._lists:
            target, publisher = self._order.target, self._order.publisher
            self._lists[found] = await self._finder.way(found, target, publisher=publisher)
        if found not in self.ways:
            self.ways.append(found)
        return self._lists[found]

    def _count(self) -> int:
        order = self._order
        return sum(1 for _ in places(order.target)) if order.wanted is None else len(order.wanted)

    # -- how it comes --------------------------------------------------------------------------------------------

    async def _fetch(self, work: Work, again_s: float) -> None:
        self._batches = deque(work.batches(self._streams))
        self._broken, self._failure = [], None
        before = self.tally.tiles
        renewal = asyncio.create_task(self._renew(again_s))
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(min(self._streams, len(self._batches))):
                    group.create_task(self._stream(first=not number))
        finally:
            renewal.cancel()
        if isinstance(self._failure, NotReady):
            raise Unavailable(f"what was named has been let go since ({self._failure}); ask again")
        if self._failure is not None:
            raise self._failure
        if self._broken:
            await self._give_up_ways()
        if self.tally.tiles - before < work.tiles:  # gRPC ends a call as cancelled when its channel is closed
            raise Unavailable("a source was closed while it was read")

    async def _give_up_ways(self) -> None:
        """The blobs were right and what came of them was not: the base was damaged, or the lists lie."""
        await self._in_thread(lambda: self._order.mirror.mend(self._broken))
        self._refused.update(way for way in self._lists if way.via)
        self._scratch = True
        raise ChunkCorrupt(f"{len(self._broken)} tiles are not the version's after their patches")

    async def _renew(self, again_s: float) -> None:
        """Stay known to the relay, and hear of better sources."""
        while again_s > 0:
            await asyncio.sleep(_AGAIN_S)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), max(0.0, again_s - _AGAIN_S))
            self._hurry.clear()
            with suppress(EbbtideError):  # it is away: go on with the sources known
                order = self._order
                have = order.mirror.versions(order.target.run_id, order.target.version.policy)
                again_s = (await self._ask(have)).again_s

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

    async def _serve(self, batch: Batch) -> None:
        """Have a source send what it can of a batch."""
        while wait := self._pool.busy_s(batch.lacking):
            self._hurry.set()  # the relay may know of others by now
            await asyncio.sleep(wait)
        try:
            source = self._pool.pick(batch.lacking)
        except EbbtideError as error:
            self._failure = error
            return
        try:
            await self._read(source, batch)
        except NotReady:
            batch.lacking.add(source.address)  # it may well have the next batch
        except EbbtideError as error:
            self._pool.drop(source, error)

    def _take_cached(self, batch: Batch) -> None:
        if self._cache is not None:
            for digest in batch.missing:
                if (data := self._cache.get(digest)) is not None:
                    batch.verified[digest] = data

    async def _read(self, source: OpenSource, batch: Batch) -> None:
        """Get what is missing of a batch. Raises why not all of it came; what came before is used, and is its doing."""
        missing = batch.missing
        try:
            patience = source.patience(self._silence_s, max(batch.sizes[digest] for digest in missing))
            async with patience, aclosing(source.source.tiles(missing)) as stream:
                async for digest, data in stream:
                    source.heard(self._silence_s, len(data))
                    batch.take(digest, data)
                    self._going.set()
                    if batch.fresh_bytes >= _SETTLE_BYTES or len(batch.fresh) >= _SETTLE_BLOBS:
                        await self._settle(batch, source)
        except EbbtideError:
            await self._settle(batch, source)
            raise
        await self._settle(batch, source)
        if batch.missing:
            raise Unavailable(f"{source.name} at {source.address} ended before it had sent all")

    async def _settle(self, batch: Batch, source: OpenSource | None = None) -> None:
        """Verify what has come, hand it on to peers, and apply what is complete. Raises `ChunkCorrupt` for a blob that
        is not what its digest says; the others are kept."""
        fresh = batch.take_fresh()
        good, took = await self._in_thread(lambda: _verified(fresh))
        self.tally.digests_s += took
        batch.verified |= good
        if source is not None and good:
            self._pool.served()
            size = sum(map(len, good.values()))
            self.tally.bytes_by_source[source.name] = self.tally.bytes_by_source.get(source.name, 0) + size
        for digest in good.keys() - batch.dense:
            self._hand_on(digest, good[digest], keep=True)
        if tasks := batch.take_ready():
            self._note(*await self._in_thread(lambda: self._apply(tasks, batch.verified)))
        for digest in good.keys() & batch.dense:
            self._hand_on(digest, good[digest], keep=False)  # now that the mirror has it
        if len(good) < len(fresh):
            raise ChunkCorrupt("a blob came that does not match its digest")

    def _hand_on(self, digest: bytes, data: bytes, *, keep: bool) -> None:
        if self._cache is not None:
            self._cache.put(digest, data, keep=keep)

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
        self.tally.tiles += done
        self.tally.digests_s += took
        self._broken += broken

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """What `work` returns. Cancelled, this too ends only after `work`: the mirror may be another's then."""
        future = asyncio.get_running_loop().run_in_executor(self._threads, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():
                with suppress(asyncio.CancelledError):  # the first is raised below
                    await asyncio.wait([future])
            raise


def _verified(blobs: dict[bytes, bytes]) -> tuple[dict[bytes, bytes], float]:
    """Those that match their digests, and the seconds that it took to tell."""
    good: dict[bytes, bytes] = {}
    start = time.perf_counter()
    for digest, data in blobs.items():
        with suppress(ChunkCorrupt):
            check_tile(digest, data)
            good[digest] = data
    return good, time.perf_counter() - start
