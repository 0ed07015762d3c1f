"""Patches of several steps, composed tile by tile without dense weights, and kept as patches like any other.

Invariant: a composed patch is connected only when all its blobs are on disk and synced. It is a copy of what its chain
says, so it goes first where room is short. When the process dies here, what was composed so far is deleted at the next
start.
"""

import asyncio
from collections.abc import Sequence
from typing import Final, TypeAlias

from ebbtide import telemetry
from ebbtide.errors import EbbtideError, InvalidRequest, VersionUnavailable
from ebbtide.scheduling.distribution.version_paths import (
    PatchStep,
    composed_size,
    find_ways,
    saved_s,
    worth_composing,
)
from ebbtide.types.weights import FoundWay, Patch
from ebbtide.weight_relay import metrics
from ebbtide.weight_relay.intake.tile_codecs import TileCodecs
from ebbtide.weight_relay.intake.tile_composer import ComposeOutcome, TileComposer
from ebbtide.weight_relay.library.relay_disk import disk_errors
from ebbtide.weight_relay.library.version_library import VersionLibrary
from ebbtide.weight_relay.library.version_records import Ends, PatchEdge, StageProgress, Stream, step_of
from ebbtide.weight_relay.library.version_retirement import VersionRetirement
from ebbtide.weights import Way, blob_sizes

log = telemetry.get_logger(__name__)
#: Bytes of chains composed per second before the first was timed: one slow core's.
_FIRST_RATE: Final = 20e6
#: Longest that an answer waits for a composed patch: well within the time that a call may take.
_PATIENCE_S: Final = 20.0
#: Weight of the newest measurement.
_SHARE: Final = 0.3

Key: TypeAlias = tuple[Stream, Ends]


class PatchComposer:
    def __init__(self, shelf: VersionLibrary, retiring: VersionRetirement, codecs: TileCodecs) -> None:
        self._shelf, self._retiring, self._codecs = shelf, retiring, codecs
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._failed: set[Key] = set()
        self._turn = asyncio.Lock()
        self._rate = _FIRST_RATE

    async def improve(self, stream: Stream, way: FoundWay, bytes_per_s: float) -> None:
        """Compose the way's patches if the requester gains by it; wait for that no longer than it may gain."""
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

    def _chain(self, stream: Stream, way: FoundWay) -> list[PatchStep]:
        """The way's patches; none if one of them is still arriving."""
        try:
            return [step_of(patch) for patch in self._shelf.index.chain(stream, way)]
        except VersionUnavailable:
            return []

    def _fits(self, key: Key, chain: Sequence[PatchStep]) -> bool:
        return self._retiring.room(key[0][0]) >= composed_size(chain)

    async def _compose(self, key: Key, way: FoundWay) -> None:
        making = StageProgress(key[0], frozenset({way.start, *way.via}), {})
        self._shelf.index.making.add(making)  # before its turn: what the way passes is to be there still
        try:
            async with self._turn:
                await self._make(making, key, way)
        except InvalidRequest as error:
            self._failed = {failed for failed in self._failed if self._here(failed)} | {key}
            log.info("patch not composed", run_id=key[0][0], base=key[1][0], version=key[1][1], error=str(error))
        except (EbbtideError, FileNotFoundError) as error:
            log.warning("patch not composed", run_id=key[0][0], error=str(error))
        finally:
            await self._shelf.finish(self._retiring.made(making))

    async def _make(self, making: StageProgress, key: Key, way: FoundWay) -> None:
        index, loop = self._shelf.index, asyncio.get_running_loop()
        base, target = (index.find(*key[0], number).manifest for number in key[1])
        patches = index.chain(key[0], way)
        from_anchor = self._from_anchor(key[0], key[1][1])
        job = TileComposer(base, target, patches, from_anchor, self._codecs, self._shelf.read_verified)
        begun, outcome = loop.time(), ComposeOutcome(target)
        async for made in self._codecs.map(job.make, job.tasks()):
            async with self._shelf.lock:  # garbage of the same name may be under way to be deleted
                for tile in made:
                    await self._shelf.store_made(making, tile.digest, tile.data)
                    outcome.add(tile)
        await self._shelf.sync()
        patch = outcome.patch(base)
        size = sum(step.size for step in patches)
        self._rate += _SHARE * (size / max(loop.time() - begun, 1e-6) - self._rate)
        if patch.size >= size:
            raise InvalidRequest(f"would have {patch.size} bytes, its chain has {size}", field="patch")
        await self._shelf.finish(self._connect(key, patch))
        metrics.COMPOSED.inc()
        metrics.COMPOSED_BYTES.inc(size)

    def _from_anchor(self, stream: Stream, version: int) -> Way | None:
        index = self._shelf.index
        if version not in index.whole(stream):
            return None
        whole = find_ways(index.anchors(stream), index.steps(stream), version, ())[0]
        start = index.find(*stream, whole.start).manifest
        return Way(start=start, patches=tuple(index.chain(stream, whole)), anchor=True)

    async def _connect(self, key: Key, patch: Patch) -> None:
        shelf = self._shelf
        async with shelf.lock:
            if key[1] in shelf.index.patches(key[0]) or not self._here(key):
                return
            with disk_errors():
                await asyncio.to_thread(shelf.disk.put_patch, patch, composed=True)
            now = shelf.clock()
            shelf.index.connect(PatchEdge(patch=patch, blobs=blob_sizes(patch), composed=True, used_at=now))
            log.info("patch composed", run_id=key[0][0], base=key[1][0], version=key[1][1], bytes=patch.size)

    def _here(self, key: Key) -> bool:
        return set(key[1]) <= self._shelf.index.stream(key[0]).keys()
