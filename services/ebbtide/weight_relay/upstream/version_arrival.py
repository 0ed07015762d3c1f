"""Brings one version here from the upstream: its manifest and patches first, then its blobs, in order.

Invariant: what this relay's readers see of an arriving version was checked: the manifest by its root and signature,
each blob by its digest. Progress lies in the relay's stages and on its disk alone, so an arrival that breaks, or whose
process dies, is begun again and asks for the rest.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Final, TypeAlias

from msgspec import Struct

from ebbtide.errors import EbbtideError, InvalidRequest, NoCapacity, NotReady, Unavailable
from ebbtide.transfer.blob_fetcher import BlobBatch, BlobFetcher
from ebbtide.transfer.mirror.digest_threads import DigestThreads
from ebbtide.transfer.version_finder import FoundVersion
from ebbtide.types.weights import TILE_BYTES, FoundWay, Manifest, Patch
from ebbtide.weight_relay import metrics
from ebbtide.weight_relay.intake.version_intake import VersionIntake
from ebbtide.weight_relay.library.version_index import VersionIndex
from ebbtide.weight_relay.library.version_records import Stream
from ebbtide.weight_relay.upstream.relay_upstream import Upstream, best_way

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
    """Brings `version` of `stream`."""

    def __init__(
        self,
        publishing: VersionIntake,
        index: VersionIndex,
        upstream: Upstream,
        stream: Stream,
        version: int,
        *,
        began: Began,
        threads: DigestThreads,
    ) -> None:
        """`began` is told the versions on their way once they can be read. `threads`: for digests."""
        self.stream, self.version = stream, version
        self._publishing, self._index, self._upstream = publishing, index, upstream
        self._began, self._threads = began, threads
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
        self._have = tuple(sorted(self._index.whole(self.stream)))
        found = await self._find()
        steps = await self._steps(best_way(found, self._have))
        try:
            missing = [await self._publishing.begin(step.manifest, step.patch, arriving=True) for step in steps]
        except NotReady as error:
            self._scratch = True
            raise Unavailable(f"a base was let go meanwhile, so come from an anchor ({error})") from None
        await self._began(frozenset(step.manifest.version.version for step in steps))
        sink = StageSink(self._publishing, list(zip(steps, missing, strict=True)))
        await sink.commit()
        await self._fetcher(chain.from_iterable(missing), sink).run(self._find, found.again_s)
        with suppress(EbbtideError):  # the upstream hears of it again
            await self._upstream.tell(self.stream, self.version)

    def _fetcher(self, digests: Iterable[bytes], sink: "StageSink") -> BlobFetcher[BlobBatch]:
        return BlobFetcher(
            _batches(digests),
            sink.take,
            self._pool,
            self._threads,
            _CALLS,
            _SILENCE_S,
            hand_over_blobs=1,  # at once: readers wait for it
            exhausted=_exhausted,
            on_fault=lambda error: metrics.UPSTREAM_FAILURES.labels(type(error).__name__).inc(),
        )

    async def _find(self) -> FoundVersion:
        return await self._pool.ask(
            lambda: self._upstream.find(
                self.stream, self.version, self._have, failed=self._pool.failed, scratch=self._scratch
            )
        )

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


class StageSink:
    """Writes verified blobs into stages, and commits each version once it is whole, in order: each is the base of the
    next."""

    def __init__(self, publishing: VersionIntake, steps: Sequence[tuple[ArrivalStep, Sequence[bytes]]]) -> None:
        """`steps`: staged versions, each with the blobs that it lacks."""
        self._publishing = publishing
        self._steps = deque((step, set(digests)) for step, digests in steps)
        self._committing = asyncio.Lock()

    async def take(self, _batch: BlobBatch, blobs: dict[bytes, bytes], _source: str) -> None:
        """Raises what the relay does; `Unavailable` if a stage, or the base of a patch, has gone meanwhile."""
        for digest, data in blobs.items():
            try:
                await self._publishing.put(digest, data, verified=True)
            except InvalidRequest as error:
                if error.field != "digest":
                    raise
                raise Unavailable(f"the stage has gone meanwhile ({error})") from None
            for _, lacking in self._steps:
                lacking.discard(digest)
        await self.commit()

    async def commit(self) -> None:
        """Commit the versions that are whole."""
        if self._committing.locked():
            return  # the one who does looks at the next version, too
        async with self._committing:
            while self._steps and not self._steps[0][1]:
                manifest = self._steps[0][0].manifest
                try:
                    await self._publishing.commit(manifest.run_id, manifest.version)
                except NotReady as error:  # its base, or a blob that was damaged, has gone meanwhile
                    raise Unavailable(str(error)) from None
                self._steps.popleft()


def _batches(digests: Iterable[bytes]) -> Iterator[BlobBatch]:
    """Pieces of one call each, so that all calls share the work to the end."""
    wanted = list(dict.fromkeys(digests))
    size = min(_MOST, max(1, len(wanted) // (2 * _CALLS)))
    for start in range(0, len(wanted), size):
        yield BlobBatch(dict.fromkeys(wanted[start : start + size], TILE_BYTES))


def _exhausted(error: EbbtideError) -> EbbtideError:
    """An error of the sources says nothing of the version."""
    if isinstance(error, NoCapacity):
        return error
    return Unavailable(f"no source is left; ask for others, or another way ({error})")
