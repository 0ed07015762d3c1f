"""Brings one version here from the upstream: its manifest and patches first, then its blobs, in order.

Invariant: what this relay's readers see of an arriving version was checked: the manifest by its root and signature,
each blob by its digest. Progress lies in the relay's stages and on its disk alone, so an arrival that breaks, or whose
process dies, is begun again and asks for the rest.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from typing import Final, TypeAlias

from ebbtide.errors import EbbtideError, NoCapacity, NotReady, Unavailable
from ebbtide.transfer.blob_fetcher import BlobBatch, BlobFetcher, FetchLimits, SourcesExhausted
from ebbtide.transfer.mirror.digest_threads import DigestThreads
from ebbtide.transfer.version_finder import FoundVersion
from ebbtide.types.weights import TILE_BYTES, FoundWay
from ebbtide.weight_relay import metrics
from ebbtide.weight_relay.library.version_records import Stream
from ebbtide.weight_relay.service import WeightRelay
from ebbtide.weight_relay.stage_sink import StageSink, Step
from ebbtide.weight_relay.upstream.relay_upstream import Upstream, best_way

#: Four calls at once keep a long link full while one ends and the next begins. Each blob is handed on as soon as it has
#: come: readers wait for it.
_LIMITS: Final = FetchLimits(streams=4, silence_s=10.0, hand_over_bytes=TILE_BYTES, hand_over_blobs=1)
#: Most blobs that one call asks for.
_MOST: Final = 64
Began: TypeAlias = Callable[[frozenset[int]], Awaitable[None]]


class VersionArrival:
    """Brings `version` of `stream`."""

    def __init__(
        self,
        relay: WeightRelay,
        upstream: Upstream,
        stream: Stream,
        version: int,
        *,
        began: Began,
        threads: DigestThreads,
    ) -> None:
        """`began` is told the versions on their way once they can be read. `threads`: for digests."""
        self.stream, self.version = stream, version
        self._relay, self._upstream, self._began, self._threads = relay, upstream, began, threads
        self._pool = upstream.pool()
        self._known: dict[tuple[FoundWay, bool], list[Step]] = {}
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
        sink = StageSink(self._relay, list(zip(steps, missing, strict=True)))
        await sink.commit()
        await self._fetch(chain.from_iterable(missing), sink, found.again_s)
        with suppress(EbbtideError):  # the upstream hears of it again
            await self._upstream.tell(self.stream, self.version)

    async def _fetch(self, digests: Iterable[bytes], sink: StageSink, again_s: float) -> None:
        """Bring the blobs, all of them and about in order."""
        fetcher = BlobFetcher(_batches(digests), sink, self._pool, self._threads, _LIMITS, on_fault=_count)
        try:
            await fetcher.run(self._find, again_s)
        except SourcesExhausted as exhausted:
            if isinstance(exhausted.error, NoCapacity):
                raise exhausted.error from None
            # The error is the sources', and says nothing of the version.
            raise Unavailable(f"no source is left; ask for others, or another way ({exhausted})") from None

    async def _find(self) -> FoundVersion:
        return await self._pool.ask(
            lambda: self._upstream.find(
                self.stream, self.version, self._have, failed=self._pool.failed, scratch=self._scratch
            )
        )

    async def _steps(self, found: FoundWay) -> list[Step]:
        """The manifests and patches of a way, which are few bytes beside its blobs; asked for once."""
        dense = found.start not in self._have
        if (found, dense) not in self._known:
            self._known[found, dense] = await self._look_up(found, dense)
        return self._known[found, dense]

    async def _look_up(self, found: FoundWay, dense: bool) -> list[Step]:
        try:
            target = await self._upstream.manifest(self.stream, self.version)
            way = await self._upstream.way(found, target)
            steps = [Step(way.start, None)] if dense else []
            for patch in way.patches:
                number = patch.version.version
                manifest = target if number == self.version else await self._upstream.manifest(self.stream, number)
                steps.append(Step(manifest, patch))
        except NotReady as error:
            raise Unavailable(f"the way was let go meanwhile; ask for another ({error})") from None
        return steps


def _batches(digests: Iterable[bytes]) -> Iterator[BlobBatch]:
    """Pieces of one call each, so that all calls share the work to the end."""
    wanted = list(dict.fromkeys(digests))
    size = min(_MOST, max(1, len(wanted) // (2 * _LIMITS.streams)))
    for start in range(0, len(wanted), size):
        yield BlobBatch(dict.fromkeys(wanted[start : start + size], TILE_BYTES))


def _count(error: EbbtideError) -> None:
    metrics.UPSTREAM_FAILURES.labels(type(error).__name__).inc()
