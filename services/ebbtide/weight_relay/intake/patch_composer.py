"""Composes the patches of a way into one, tile by tile and without dense weights, and keeps it like any other patch.

Invariant: a composed patch is connected only when all its blobs are on disk and synced. It can be composed again, so it
is dropped first where room is short. After the process dies, the next start deletes an unfinished one.
"""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

from msgspec import Struct

from ebbtide import telemetry
from ebbtide.errors import EbbtideError, InvalidRequest, VersionUnavailable
from ebbtide.types.weights import FetchPath, Manifest, Patch, TensorPatch
from ebbtide.weight_relay import metrics
from ebbtide.weight_relay.intake.tile_codecs import Read, TileCodecs, patched, rebuild
from ebbtide.weight_relay.library.garbage_collector import GarbageCollector
from ebbtide.weight_relay.library.relay_disk import disk_errors
from ebbtide.weight_relay.library.version_index import Ends, PatchEdge, StageProgress, step_of
from ebbtide.weight_relay.library.version_library import VersionLibrary
from ebbtide.weight_relay.retention import Stream
from ebbtide.weight_relay.version_paths import (
    PatchStep,
    composed_size,
    find_paths,
    saved_s,
    worth_composing,
)
from ebbtide.weights import Place, Planner, TileTask, Way, blob_sizes, places, seal_patch, tile_digest
from ebbtide.weights.patch import SPARSE_HEAD, Kind, read_tile
from ebbtide.weights.tensors import unit_width

log = telemetry.get_logger(__name__)
#: Bytes of chains composed per second until the first is timed: the rate of one slow core.
_FIRST_RATE: Final = 20e6
#: Longest time that an answer waits for a composed patch: well within a call's deadline.
_PATIENCE_S: Final = 20.0
#: Weight of the newest measurement.
_SHARE: Final = 0.3

Key: TypeAlias = tuple[Stream, Ends]


class PatchComposer:
    def __init__(self, library: VersionLibrary, collector: GarbageCollector, codecs: TileCodecs) -> None:
        self._library, self._collector, self._codecs = library, collector, codecs
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._failed: set[Key] = set()
        self._turn = asyncio.Lock()
        self._rate = _FIRST_RATE

    async def improve(self, stream: Stream, way: FetchPath, bytes_per_s: float) -> None:
        """Compose the way's patches if the requester gains by it. Wait no longer than the time it saves."""
        key = stream, (way.start, way.via[-1] if way.via else way.start)
        task = self._tasks.get(key)
        chain = self._chain(stream, way)
        if task is None:
            if key in self._failed or not worth_composing(chain, bytes_per_s, self._rate) or not self._fits(key, chain):
                return
            task = self._tasks[key] = asyncio.create_task(self._compose(key, way), name="compose")
            task.add_done_callback(lambda _: self._tasks.pop(key, None))
        await asyncio.wait({task}, timeout=min(saved_s(chain, bytes_per_s), _PATIENCE_S))

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _chain(self, stream: Stream, way: FetchPath) -> list[PatchStep]:
        """The way's patches; none of them if one is still arriving."""
        try:
            return [step_of(patch) for patch in self._library.index.chain(stream, way)]
        except VersionUnavailable:
            return []

    def _fits(self, key: Key, chain: Sequence[PatchStep]) -> bool:
        return self._collector.room(key[0][0]) >= composed_size(chain)

    async def _compose(self, key: Key, way: FetchPath) -> None:
        making = StageProgress(key[0], frozenset({way.start, *way.via}), {})
        self._library.index.making.add(making)  # before its turn, so that the way's versions stay
        try:
            async with self._turn:
                await self._make(making, key, way)
        except InvalidRequest as error:
            self._failed = {failed for failed in self._failed if self._here(failed)} | {key}
            log.info("patch not composed", run_id=key[0][0], base=key[1][0], version=key[1][1], error=str(error))
        except (EbbtideError, FileNotFoundError) as error:
            log.warning("patch not composed", run_id=key[0][0], error=str(error))
        finally:
            await self._library.finish(self._collector.made(making))

    async def _make(self, making: StageProgress, key: Key, way: FetchPath) -> None:
        index, loop = self._library.index, asyncio.get_running_loop()
        base, target = (index.find(*key[0], number).manifest for number in key[1])
        patches = index.chain(key[0], way)
        from_keyframe = self._from_keyframe(key[0], key[1][1])
        job = _TileComposer(base, target, patches, from_keyframe, self._codecs, self._library.read_verified)
        begun, outcome = loop.time(), _Outcome(target)
        async for made in self._codecs.map(job.make, job.tasks()):
            async with self._library.lock:  # a blob of the same name may be about to be deleted
                for tile in made:
                    await self._library.store_made(making, tile.digest, tile.data)
                    outcome.add(tile)
        await self._library.sync()
        patch = outcome.patch(base)
        size = sum(step.size for step in patches)
        self._rate += _SHARE * (size / max(loop.time() - begun, 1e-6) - self._rate)
        if patch.size >= size:
            raise InvalidRequest(f"would have {patch.size} bytes, its chain has {size}", field="patch")
        await self._library.finish(self._connect(key, patch))
        metrics.COMPOSED.inc()
        metrics.COMPOSED_BYTES.inc(size)

    def _from_keyframe(self, stream: Stream, version: int) -> Way | None:
        index = self._library.index
        if version not in index.whole(stream):
            return None
        whole = find_paths(index.keyframes(stream), index.steps(stream), version, ())[0]
        start = index.find(*stream, whole.start).manifest
        return Way(start=start, patches=tuple(index.chain(stream, whole)), keyframe=True)

    async def _connect(self, key: Key, patch: Patch) -> None:
        library = self._library
        async with library.lock:
            if key[1] in library.index.patches(key[0]) or not self._here(key):
                return
            with disk_errors():
                await asyncio.to_thread(library.disk.put_patch, patch, composed=True)
            now = library.clock()
            library.index.connect(PatchEdge(patch=patch, blobs=blob_sizes(patch), composed=True, used_at=now))
            log.info("patch composed", run_id=key[0][0], base=key[1][0], version=key[1][1], bytes=patch.size)

    def _here(self, key: Key) -> bool:
        return set(key[1]) <= self._library.index.stream(key[0]).keys()


class _Tile(Struct, frozen=True):
    """The blob of a composed tile."""

    place: Place
    digest: bytes
    data: bytes
    changed: int  # units of the tile, at most


class _TileComposer:
    """The tiles of one composed patch. `make` runs in threads."""

    def __init__(
        self,
        base: Manifest,
        target: Manifest,
        patches: Sequence[Patch],
        from_keyframe: Way | None,
        codecs: TileCodecs,
        read: Read,
    ) -> None:
        """`from_keyframe`: a way from a keyframe to the target, if there is one."""
        self._base, self._target, self._patches, self._from_keyframe = base, target, patches, from_keyframe
        self._codecs, self._read = codecs, read

    def tasks(self) -> Iterator[TileTask]:
        """One task for each tile in which the versions differ."""
        held = {place: self._base.tensors[place[0]].digests[place[1]] for place in places(self._base)}
        way = Way(start=self._base, patches=tuple(self._patches), keyframe=False)
        for task in Planner(self._target, [way]).tasks(places(self._target), held):
            if isinstance(task, TileTask):
                yield task

    def make(self, task: TileTask) -> _Tile:
        """Raises `InvalidRequest` if it cannot be composed, or does not match the manifest."""
        width = unit_width(self._target.tensors[task.place[0]].dtype)
        units = task.length // width
        patches = [self._read(digest) for digest in task.patches]
        if task.dense:
            return self._dense(task, patched(self._read(task.dense), patches, width, self._codecs))
        data = patches[0] if len(patches) == 1 else self._codecs.of(width).compose(patches, units)
        if len(data) >= task.length:
            return self._as_dense(task, data, width)
        kind = read_tile(data, width, units).kind
        if kind == Kind.SAME:
            raise InvalidRequest("changes nothing where its versions differ", field="patch")
        return _Tile(task.place, tile_digest(data), data, _changed(data, width, units))

    def _as_dense(self, task: TileTask, data: bytes, width: int) -> _Tile:
        """Replace a tile patch that is not smaller than its tile by the tile, from the patch itself or a keyframe."""
        if read_tile(data, width, task.length // width).kind in {Kind.DENSE, Kind.PACKED}:
            return self._dense(task, patched(bytes(task.length), [data], width, self._codecs))
        if self._from_keyframe is not None:
            for whole in Planner(self._target, [self._from_keyframe]).tasks([task.place], {}):
                if isinstance(whole, TileTask):
                    return self._dense(task, rebuild(whole, width, self._codecs, self._read))
        raise InvalidRequest("is larger composed than its dense tile, which is not here", field="patch")

    def _dense(self, task: TileTask, data: bytes) -> _Tile:
        if tile_digest(data) != task.digest:
            raise InvalidRequest("makes another tile than its manifest says", field="patch")
        width = unit_width(self._target.tensors[task.place[0]].dtype)
        return _Tile(task.place, task.digest, data, task.length // width)


class _Outcome:
    """Collects composed tiles into a patch."""

    def __init__(self, target: Manifest) -> None:
        self._target = target
        self._tiles: dict[Place, tuple[int, bytes]] = {}
        self._changed = 0

    def add(self, tile: _Tile) -> None:
        self._tiles[tile.place] = len(tile.data), tile.digest
        self._changed += tile.changed

    def patch(self, base: Manifest) -> Patch:
        tensors = []
        for tensor, entry in enumerate(self._target.tensors):
            tiles = [self._tiles.get((tensor, tile), (0, b"")) for tile in range(len(entry.digests))]
            digests = tuple(digest for size, digest in tiles if size)
            tensors.append(TensorPatch(sizes=tuple(size for size, _ in tiles), digests=digests))
        elements = sum(entry.size // unit_width(entry.dtype) for entry in self._target.tensors)
        return seal_patch(
            Patch(
                run_id=base.run_id,
                base=base.version,
                version=self._target.version,
                tensors=tuple(tensors),
                changed=min(self._changed, elements),
                elements=elements,
            )
        )


def _changed(data: bytes, width: int, units: int) -> int:
    """Count the units that a tile patch changes: those in a sparse one, else all."""
    tile = read_tile(data, width, units)
    return int(SPARSE_HEAD.unpack_from(tile.payload)[0]) if tile.kind == Kind.SPARSE else units
