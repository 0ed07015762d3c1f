"""Builds keyframes: the dense tiles of a version from an older keyframe and the patches in between.

Invariant: a version is marked as a keyframe only when all its dense tiles were checked against its manifest, written
and synced. One keyframe is built at a time, tile by tile, in threads, beside commits and reads. After the process dies,
the next start deletes the tiles made so far and builds the keyframe again. A patch that does not make its version is
withdrawn, and so is the version if nothing else leads to it.
"""

import asyncio
from collections.abc import Iterator, Sequence

from ebbtide import telemetry
from ebbtide.errors import ChunkCorrupt, EbbtideError, InvalidRequest, NoCapacity
from ebbtide.types.weights import FetchPath, Manifest, Patch
from ebbtide.weight_relay import metrics
from ebbtide.weight_relay.intake.publishing import count_refusal
from ebbtide.weight_relay.intake.tile_codecs import TileCodecs, first_wrong, rebuild
from ebbtide.weight_relay.library.garbage_collector import GarbageCollector
from ebbtide.weight_relay.library.relay_disk import disk_errors
from ebbtide.weight_relay.library.version_index import Ends, StageProgress
from ebbtide.weight_relay.library.version_library import VersionLibrary, named
from ebbtide.weight_relay.retention import Node, Stream
from ebbtide.weight_relay.version_paths import find_paths, wants_keyframe
from ebbtide.weights import Planner, TileTask, Way, places, tile_sizes
from ebbtide.weights.tensors import unit_width

log = telemetry.get_logger(__name__)


class KeyframeBuilder:
    def __init__(self, library: VersionLibrary, collector: GarbageCollector, codecs: TileCodecs) -> None:
        self._library, self._collector, self._codecs = library, collector, codecs
        self._task: asyncio.Task[None] | None = None

    def consider(self) -> None:
        """Check in the background whether a keyframe is due. One that is being built ends with another check."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work(), name="keyframes")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _work(self) -> None:
        tried: set[Node] = set()
        while node := next((node for node in self._due() if node not in tried), None):
            tried.add(node)  # one that fails is tried again at the next check, not for ever
            try:
                await self._make(*node)
            except _Wrong:
                tried.discard(node)  # by another way: the wrong patch is withdrawn
            except EbbtideError as error:
                log.warning("keyframe not made", error=str(error))
            except OSError:
                log.exception("keyframe not made")

    def _due(self) -> Iterator[Node]:
        index, settings = self._library.index, self._library.settings
        for stream in index.streams():
            newest = max(index.whole(stream), default=0)
            if way := self._way(stream, newest):
                dense = index.keyframes(stream)[way.start]
                room = self._collector.room(stream[0])
                if wants_keyframe(way, dense, room, every=settings.keyframe_every, share=settings.keyframe_share):
                    yield stream, newest
        for stream, version in self._collector.wanted_keyframes:
            if self._way(stream, version):
                yield stream, version

    def _way(self, stream: Stream, version: int) -> FetchPath | None:
        """The cheapest way to a version; None if it is a keyframe."""
        index = self._library.index
        holding = index.whole(stream).get(version)
        if holding is None or holding.keyframe:
            return None
        return find_paths(index.keyframes(stream), index.steps(stream), version, ())[0]

    async def _make(self, stream: Stream, version: int) -> None:
        library = self._library
        async with library.lock:
            if (way := self._way(stream, version)) is None:
                return
            versions = frozenset({way.start, *way.via})
            making = StageProgress(stream, versions, dict(tile_sizes(library.index.stream(stream)[version].manifest)))
            library.index.making.add(making)
        try:
            await library.finish(self._make_room(stream, version))
            await self._fill(making, way)
            await library.sync()
            await library.finish(self._finish(making, version))
        finally:
            await library.finish(self._collector.made(making))

    async def _make_room(self, stream: Stream, version: int) -> None:
        async with self._library.lock:
            plan = await self._collector.plan()
            if plan.excess_bytes or stream[0] in plan.over_quota:
                raise NoCapacity(f"no room for a keyframe at version {version} of {stream[1]} of run {stream[0]}")
            await self._collector.follow(plan)

    async def _fill(self, making: StageProgress, way: FetchPath) -> None:
        stream, numbers = making.stream, (way.start, *way.via)
        index = self._library.index
        start, *manifests = (index.find(*stream, number).manifest for number in numbers)
        chain = list(zip(manifests, index.chain(stream, way), strict=True))
        job = _Job(start, chain, self._codecs, self._library)
        try:
            async for made in self._codecs.map(job.make, job.tasks()):
                for digest, data in made:
                    await self._library.store_made(making, digest, data)
        except _Wrong as wrong:
            edge = index.patches(stream).get(wrong.ends)
            if edge is not None and not edge.composed:
                count_refusal("patch", run_id=stream[0], **named(edge.patch.version), error=str(wrong))
            await self._library.finish(self._collector.withdraw_patch(stream, wrong.ends))
            raise
        except _Damaged as damaged:
            raise await self._library.finish(self._collector.withdraw_blob(damaged.digest, str(damaged))) from None

    async def _finish(self, making: StageProgress, version: int) -> None:
        library = self._library
        async with library.lock:
            holding = library.index.stream(making.stream).get(version)
            if holding is None or holding.keyframe:
                return
            with disk_errors():
                await asyncio.to_thread(library.disk.mark, making.stream, version, keyframe=True)
            library.index.promote(holding)
            metrics.KEYFRAMES_MADE.inc()
            log.info("keyframe made", run_id=making.stream[0], **named(holding.manifest.version))


class _Wrong(Exception):
    def __init__(self, ends: Ends) -> None:
        super().__init__(f"the patch from version {ends[0]} to {ends[1]} does not make its version's tile")
        self.ends = ends


class _Damaged(Exception):
    def __init__(self, digest: bytes, reason: str) -> None:
        super().__init__(reason)
        self.digest = digest


class _Job:
    """The tiles of one keyframe. `make` runs in threads."""

    def __init__(
        self, start: Manifest, chain: Sequence[tuple[Manifest, Patch]], codecs: TileCodecs, library: VersionLibrary
    ) -> None:
        self._start, self._chain = start, chain
        self._target = chain[-1][0]
        self._codecs, self._library = codecs, library

    def tasks(self) -> Iterator[TileTask]:
        """One task for each distinct tile of the version."""
        way = Way(start=self._start, patches=tuple(patch for _, patch in self._chain), keyframe=True)
        seen: set[bytes] = set()
        for task in Planner(self._target, [way]).tasks(places(self._target), {}):
            if isinstance(task, TileTask) and task.digest not in seen:
                seen.add(task.digest)
                yield task

    def make(self, task: TileTask) -> tuple[bytes, bytes]:
        tensor = self._target.tensors[task.place[0]]
        try:
            return task.digest, rebuild(task, unit_width(tensor.dtype), self._codecs, self._read)
        except InvalidRequest:
            ends = first_wrong(task.place, self._start, self._chain, self._codecs, self._read)
            if ends is None:
                raise  # no patch is at fault
            raise _Wrong(ends) from None

    def _read(self, digest: bytes) -> bytes:
        try:
            return self._library.read_verified(digest)
        except (ChunkCorrupt, FileNotFoundError) as error:
            raise _Damaged(digest, str(error)) from None
