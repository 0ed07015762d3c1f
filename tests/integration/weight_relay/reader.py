"""A reader that brings tiles to a version by hand: FindWay, GetManifest, GetPatch, FetchTiles, and the tile codec."""

from collections.abc import Iterable
from typing import TypeAlias

import numpy as np

from ebbtide.types.weights import FetchPath, Manifest
from ebbtide.weights import Place, Planner, TileTask, Way, check_manifest, check_patch, check_tile, places, tile_size
from ebbtide.weights.patch import TileCodec
from ebbtide.weights.tensors import unit_width
from tests.integration.weight_relay.lines import Version
from tests.integration.weight_relay.wire import Wire

Tiles: TypeAlias = dict[Place, bytes]


def tiles_by_place(version: Version) -> Tiles:
    """The dense tiles of a version."""
    manifest = version.manifest
    return {(i, j): version.tiles[manifest.tensors[i].digests[j]] for i, j in places(manifest)}


def digests(manifest: Manifest) -> dict[Place, bytes]:
    return {(i, j): manifest.tensors[i].digests[j] for i, j in places(manifest)}


class Reader:
    """`fetched` counts the bytes of all blobs."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.fetched = 0

    async def pull(self, version: int, held: Version | None = None, *, bytes_per_s: float = 0.0) -> Tiles:
        """The version's tiles, each checked, out of those of `held`."""
        have = [held.number] if held else []
        found = await self._wire.ways(version, have, bytes_per_s=bytes_per_s)
        return await self.follow(version, found, held)

    async def follow(self, version: int, found: Iterable[FetchPath], held: Version | None) -> Tiles:
        target = await self._wire.manifest(version)
        check_manifest(target)
        ways = [await self._way(way, target) for way in found]
        tiles = tiles_by_place(held) if held else {}
        now = digests(held.manifest) if held else {}
        for task in Planner(target, ways).tasks(places(target), now):
            assert isinstance(task, TileTask), f"no way for {task}"
            tiles[task.place] = await self._made(task, target, tiles.get(task.place, b""))
        return tiles

    async def _way(self, way: FetchPath, target: Manifest) -> Way:
        patches, base = [], way.start
        for number in way.via:
            manifest = target if number == target.version.version else await self._wire.manifest(number)
            patches.append(await self._wire.patch(base, manifest))
            check_patch(patches[-1], manifest)
            base = number
        return Way(start=await self._wire.manifest(way.start), patches=tuple(patches), keyframe=way.keyframe)

    async def _made(self, task: TileTask, target: Manifest, tile: bytes) -> bytes:
        blobs = await self._wire.fetch(task.blobs)
        self.fetched += sum(map(len, blobs.values()))
        entry = target.tensors[task.place[0]]
        width = unit_width(entry.dtype)
        units = np.frombuffer(bytearray(blobs[task.dense] if task.dense else tile), f"<u{width}")
        for digest in task.patches:
            check_tile(digest, blobs[digest])
            TileCodec(width).apply(blobs[digest], units)
        made = units.tobytes()
        check_tile(task.digest, made, tile_size(entry, task.place[1], target.tile_bytes))
        return made
