"""One version on its way here from the upstream: its manifest and patches first, then its blobs, in order.

Invariant: what this relay's readers see of an arriving version was checked: the manifest by its root and signature,
each blob by its digest. Progress lies in the relay's stages and on its disk alone, so an arrival that breaks, or whose
process dies, is begun again and asks for the rest.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from typing import Final, TypeAlias

from msgspec import Struct

from ebbtide import telemetry
from ebbtide.errors import ChunkCorrupt, EbbtideError, InvalidRequest, NoCapacity, NotReady, Unavailable
from ebbtide.transfer.sources.source_pool import OpenSource
from ebbtide.transfer.version_finder import FoundVersion
from ebbtide.types.weights import TILE_BYTES, FoundWay, Manifest, Patch
from ebbtide.weight_relay import metrics
from ebbtide.weight_relay.library.version_records import Stream
from ebbtide.weight_relay.service import WeightRelay
from ebbtide.weight_relay.upstream.relay_upstream import Upstream, best_way

log = telemetry.get_logger(__name__)

#: Calls for blobs at once, so that a long link is full while one call ends and the next begins; and blobs in each.
_CALLS: Final = 4
_MOST: Final = 64
#: For how long a source may send nothing, besides what its pauses were so far.
_SILENCE_S: Final = 10.0
Began: TypeAlias = Callable[[frozenset[int]], Awaitable[None]]


class ArrivalStep(Struct, frozen=True):
    """A version on the way, and the patch that leads to it from the step before; None: all its dense tiles."""

    manifest: Manifest
    patch: Patch | None


class VersionArrival:
    """Brings `version` of `stream`. `began` is told the versions on its way once they can be read."""

    def __init__(self, relay: WeightRelay, upstream: Upstream, stream: Stream, version: int, *, began: Began) -> None:
        self.stream, self.version = stream, version
        self._relay, self._upstream, self._began = relay, upstream, began
        self._pool = upstream.pool()
        self._known: dict[tuple[FoundWay, bool], list[ArrivalStep]] = {}
        self._have: tuple[int, ...] = ()
        self._scratch = False

    async def close(self) -> None:
        await self._pool.close()

    async def run(self) -> None:
        """Go on from what is here until the version is committed. Raises what broke it.

        `VersionUnavailable` if the upstream has not got it (any more). After `Unavailable`, `ChunkCorrupt`,
        `NoCapacity` and `Internal` call it again: it passes over sources that broke.
        """
        self._have = tuple(sorted(self._relay.index.whole(self.stream)))
        found = await self._find()
        steps = await self._steps(best_way(found, self._have))
        try:
            missing = [await self._relay.begin(step.manifest, step.patch, arriving=True) for step in steps]
        except NotReady as error:
            self._scratch = True
            raise Unavailable(f"a base was let go meanwhile, so come from an anchor ({error})") from None
        await self._began(frozenset(step.manifest.version.version for step in steps))
        renewal = asyncio.create_task(self._renew(found.again_s))
        try:
            for step, digests in zip(steps, missing, strict=True):
                await self._fetch(digests)
                await self._commit(step)
        except _OwnFault as fault:
            raise fault.error from None
        finally:
            renewal.cancel()
        with suppress(EbbtideError):  # the upstream hears of it again
            await self._upstream.tell(self.stream, self.version)

    async def _find(self) -> FoundVersion:
        failed, dropped = self._pool.failed, self._pool.dropped
        found = await self._upstream.find(self.stream, self.version, self._have, failed=failed, scratch=self._scratch)
        self._pool.renew(found.sources, dropped)
        await self._pool.close_dropped()
        return found

    async def _renew(self, again_s: float) -> None:
        """Say again and again that this relay is fetching; from whom may change by it."""
        while True:
            await asyncio.sleep(max(1.0, again_s))
            try:
                again_s = (await self._find()).again_s
            except EbbtideError as error:
                log.info("upstream not asked again", reason=str(error))

    async def _steps(self, found: FoundWay) -> list[ArrivalStep]:
        """The manifests and patches of a way, which are few bytes beside its blobs; asked for once."""
        dense = found.start not in self._have
        if (found, dense) not in self._known:
            self._known[found, dense] = await self._look_up(found, dense)
        return self._known[found, dense]

    async def _look_up(self, found: FoundWay, dense: bool) -> list[ArrivalStep]:
        try:
            target = await self._upstream.manifest(self.stream, self.version)
            way = await self._upstream.way(found, target)
            steps = [ArrivalStep(way.start, None)] if dense else []
            for patch in way.patches:
                number = patch.version.version
                manifest = target if number == self.version else await self._upstream.manifest(self.stream, number)
                steps.append(ArrivalStep(manifest, patch))
        except NotReady as error:
            raise Unavailable(f"the way was let go meanwhile; ask for another ({error})") from None
        return steps

    async def _commit(self, step: ArrivalStep) -> None:
        try:
            await self._relay.commit(self.stream[0], step.manifest.version)
        except NotReady as error:  # its base, or a blob that was damaged, has gone meanwhile
            raise Unavailable(str(error)) from None

    async def _fetch(self, digests: Sequence[bytes]) -> None:
        """Bring the blobs, all of them and about in order. Raises when no source is left."""
        todo = deque(digests)
        size = min(_MOST, max(1, len(todo) // (2 * _CALLS)))

        async def call() -> None:
            while todo:
                await self._fetch_window([todo.popleft() for _ in range(min(size, len(todo)))])

        calls = [asyncio.create_task(call()) for _ in range(min(_CALLS, len(todo)))]
        try:
            await asyncio.gather(*calls)
        finally:
            for task in calls:
                task.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    async def _fetch_window(self, window: Sequence[bytes]) -> None:
        """Bring some blobs from one source after another."""
        wanted = dict.fromkeys(window)
        lacking: set[str] = set()
        while wanted:
            if wait := self._pool.busy_s(lacking):
                await asyncio.sleep(wait)
                continue
            try:
                source = self._pool.pick(lacking)
            except NoCapacity:
                raise
            except EbbtideError as error:  # theirs, and none of the version's
                raise Unavailable(f"no source is left; ask for others, or another way ({error})") from None
            with self._pool.blaming(source, lacking), _counted():
                await self._read(source, wanted, lacking)

    async def _read(self, source: OpenSource, wanted: dict[bytes, None], lacking: set[str]) -> None:
        async with (
            source.patience(_SILENCE_S, TILE_BYTES) as clock,
            aclosing(source.source.tiles(list(wanted))) as blobs,
        ):
            async for digest, data in blobs:
                source.heard(_SILENCE_S, len(data))
                self._pool.served()
                if digest not in wanted:
                    raise ChunkCorrupt("a blob came that was not asked for")
                with source.resting(clock, _SILENCE_S):
                    await self._put(digest, data)
                del wanted[digest]
                if wanted and self._pool.lags(source, lacking):
                    raise NoCapacity(f"{source.name} at {source.address} is slow", retry_after_s=0.0)
        if wanted:
            raise Unavailable(f"{source.name} at {source.address} left out {len(wanted)} blobs")

    async def _put(self, digest: bytes, data: bytes) -> None:
        try:
            await self._relay.put(digest, data)
        except ChunkCorrupt:
            raise
        except EbbtideError as error:
            raise _OwnFault(error) from None


@contextmanager
def _counted() -> Iterator[None]:
    try:
        yield
    except EbbtideError as error:
        metrics.UPSTREAM_FAILURES.labels(type(error).__name__).inc()
        raise


class _OwnFault(Exception):
    """What a blob failed at here, for which its source is not to blame: a full disk, a stage that has gone."""

    def __init__(self, error: EbbtideError) -> None:
        gone = isinstance(error, InvalidRequest) and error.field == "digest"
        self.error = Unavailable(f"the stage has gone meanwhile ({error})") if gone else error
