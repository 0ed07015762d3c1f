"""Brings one version here from the upstream: its manifests and patches first, then its blobs, in order.

Invariant: readers of an arriving version see only what was checked: the manifest by its root and signature, each blob
by its digest. Progress lies in the relay's stages and on its disk alone. So an arrival that breaks, or whose process
dies, starts again and asks for the rest.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Final, TypeAlias

from ebbtide.errors import EbbtideError, InvalidRequest, NoCapacity, NotReady, Unavailable
from ebbtide.scheduling.distribution.retained_bytes import Stream
from ebbtide.transfer.blob_fetcher import BlobBatch, BlobFetcher, FetchMeans
from ebbtide.transfer.version_finder import FoundVersion, WayRequest
from ebbtide.types.weights import TILE_BYTES, FoundWay, Manifest, Patch
from ebbtide.weight_relay import metrics
from ebbtide.weight_relay.intake.version_intake import VersionIntake
from ebbtide.weight_relay.library.version_index import VersionIndex
from ebbtide.weight_relay.upstream.relay_upstream import Upstream, best_way

#: Blobs of one call.
_MOST: Final = 64

Began: TypeAlias = Callable[[frozenset[int]], Awaitable[None]]
#: A version to stage, and the patch that leads to it from the step before; None: all its dense tiles.
ArrivalStep: TypeAlias = tuple[Manifest, Patch | None]


class VersionArrival:
    """Brings `version` of `stream`."""

    def __init__(
        self,
        intake: VersionIntake,
        index: VersionIndex,
        upstream: Upstream,
        stream: Stream,
        version: int,
        *,
        began: Began,
        means: FetchMeans,
    ) -> None:
        """`began` gets the versions on their way once they can be read."""
        self.stream, self.version = stream, version
        self._intake, self._index, self._upstream = intake, index, upstream
        self._began, self._means = began, means
        self._pool = upstream.pool()
        self._known: dict[tuple[FoundWay, bool], list[ArrivalStep]] = {}
        self._have: tuple[int, ...] = ()
        self._scratch = False

    async def close(self) -> None:
        await self._pool.close()

    async def run(self) -> None:
        """Go on from what is here until the version is committed. Raises what broke it.

        `VersionUnavailable`: the upstream does not have it. After `Unavailable`, `ChunkCorrupt`, `NoCapacity` and
        `Internal` call it again: it passes over sources that broke.
        """
        self._have = tuple(sorted(self._index.whole(self.stream)))
        found = await self._find()
        steps = await self._steps(best_way(found, self._have))
        try:
            missing = [await self._intake.begin(*step, arriving=True) for step in steps]
        except NotReady as error:
            self._scratch = True
            raise Unavailable(f"a base was dropped meanwhile, so come from an anchor ({error})") from None
        await self._began(frozenset(manifest.version.version for manifest, _ in steps))
        sink = StageSink(self._intake, list(zip(steps, missing, strict=True)))
        await sink.commit()
        batches = _batches(chain.from_iterable(missing), self._means.streams)
        fetcher = BlobFetcher(batches, sink.take, self._pool, self._means, exhausted=_exhausted, on_fault=_count_fault)
        await fetcher.run(self._find, found.again_s)
        with suppress(EbbtideError):  # the upstream hears of it again
            await self._upstream.find(self._request(done=True))

    def _request(self, *, done: bool = False) -> WayRequest:
        return WayRequest(
            run_id=self.stream[0],
            policy=self.stream[1],
            version=self.version,
            have=(self.version,) if done else self._have,
            failed=() if done else self._pool.failed,
            done=done,
            scratch=self._scratch and not done,
        )

    async def _find(self) -> FoundVersion:
        return await self._pool.ask(lambda: self._upstream.find(self._request()))

    async def _steps(self, found: FoundWay) -> list[ArrivalStep]:
        """The manifests and patches of a way, fetched once. They are few bytes beside its blobs."""
        dense = found.start not in self._have
        if (found, dense) not in self._known:
            try:
                target = await self._upstream.manifest(self.stream, self.version)
                manifests, patches = await self._upstream.way(found, target)
            except NotReady as error:
                raise Unavailable(f"the way was dropped meanwhile; ask for another ({error})") from None
            steps: list[ArrivalStep] = list(zip(manifests, (None, *patches), strict=True))
            self._known[found, dense] = steps if dense else steps[1:]
        return self._known[found, dense]


class StageSink:
    """Fills stages with the blobs that a `BlobFetcher` hands over. Commits each version once it is whole, in order:
    each is the base of the next."""

    def __init__(self, intake: VersionIntake, steps: Sequence[tuple[ArrivalStep, Sequence[bytes]]]) -> None:
        """`steps`: staged versions, each with the blobs that it lacks."""
        self._intake = intake
        self._stages = deque((manifest, set(digests)) for (manifest, _), digests in steps)
        self._committing = asyncio.Lock()

    async def take(self, _batch: BlobBatch, blobs: dict[bytes, bytes], _source: str) -> None:
        """Raises the relay's errors; `Unavailable` if a stage, or the base of a patch, is gone."""
        for digest, data in blobs.items():
            try:
                await self._intake.put(digest, data, verified=True)
            except InvalidRequest as error:
                if error.field != "digest":
                    raise
                raise Unavailable(f"the stage has gone meanwhile ({error})") from None
            for _, lacking in self._stages:
                lacking.discard(digest)
        await self.commit()

    async def commit(self) -> None:
        """Commit the versions that are whole."""
        if self._committing.locked():
            return  # the call that has the lock looks at the next version, too
        async with self._committing:
            while self._stages and not self._stages[0][1]:
                manifest = self._stages[0][0]
                try:
                    await self._intake.commit(manifest.run_id, manifest.version)
                except NotReady as error:  # its base, or a damaged blob, is gone
                    raise Unavailable(str(error)) from None
                self._stages.popleft()


def _batches(digests: Iterable[bytes], streams: int) -> Iterator[BlobBatch]:
    """Split blobs into calls, small enough that all streams share the work until the end."""
    wanted = list(dict.fromkeys(digests))
    size = min(_MOST, max(1, len(wanted) // (2 * streams)))
    for start in range(0, len(wanted), size):
        yield BlobBatch(dict.fromkeys(wanted[start : start + size], TILE_BYTES))


def _exhausted(error: EbbtideError) -> EbbtideError:
    """An error of the sources says nothing about the version."""
    if isinstance(error, NoCapacity):
        return error
    return Unavailable(f"no source is left; ask for others, or another way ({error})")


def _count_fault(error: EbbtideError) -> None:
    metrics.UPSTREAM_FAILURES.labels(type(error).__name__).inc()
