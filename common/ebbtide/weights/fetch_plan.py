"""What has to be fetched for each tile, by whoever holds some version, or none, and wants another.

A *way* leads to the wanted version: from a start, whose dense tiles may be had too if it is an anchor, through patches
one after another. A tile may go any way that begins at what it is now, told by its digest; so one that was left behind
when a process died, or that differs for any other reason, is brought to the wanted version like all others.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from msgspec import Struct

from ebbtide.types.weights import Manifest, Patch
from ebbtide.weights.tiles import tile_size

#: (tensor, tile): the index of an entry in its manifest, and of a tile in its entry.
Place: TypeAlias = tuple[int, int]


class Way(Struct, frozen=True):
    """`anchor`: whether dense tiles of `start` may be had. `patches` lead from it to the wanted version, in order."""

    start: Manifest
    patches: tuple[Patch, ...]
    anchor: bool


class TileTask(Struct, frozen=True):
    """Make a tile what its `digest` says, of `length` bytes: the dense tile `dense`, or where that is empty what is
    there, changed by the tile patches `patches` in order. `cost`: bytes to be fetched."""

    place: Place
    digest: bytes
    length: int
    dense: bytes
    patches: tuple[bytes, ...]
    cost: int

    @property
    def blobs(self) -> tuple[bytes, ...]:
        """All that is to be fetched, by digest."""
        return (self.dense, *self.patches) if self.dense else self.patches


class Planner:
    """Plans for one wanted version, given ways to it: their manifests and patches were checked, of its geometry."""

    def __init__(self, target: Manifest, ways: Sequence[Way]) -> None:
        self._target = target
        self._ways = ways
        # For each patch and tensor: the place of each tile's digest among those of the tiles that change, or None.
        self._blobs = {
            id(patch): [_blobs(tensor.sizes, tensor.digests) for tensor in patch.tensors] for patch in _all(ways)
        }

    def tasks(self, places: Iterable[Place], held: "dict[Place, bytes]") -> Iterator[TileTask | Place]:
        """What is to be done for each of `places`, whose digests are `held`; nothing for a tile that is right already.

        A place itself stands for one that no way leads to.
        """
        for place in places:
            entry = self._target.tensors[place[0]]
            digest = entry.digests[place[1]]
            now = held.get(place, b"")
            if now == digest:
                continue
            best = min(self._candidates(place, now), key=lambda task: task.cost, default=None)
            yield place if best is None else best

    def _candidates(self, place: Place, now: bytes) -> Iterator[TileTask]:
        tensor, tile = place
        entry = self._target.tensors[tensor]
        length, digest = tile_size(entry, tile, self._target.tile_bytes), entry.digests[tile]
        for way in self._ways:
            start = way.start.tensors[tensor].digests[tile]
            if now != start and not way.anchor:
                continue
            dense = b"" if now == start else start
            size = length if dense else 0
            chain: list[bytes] = []
            for patch in way.patches:
                if (blob := self._blobs[id(patch)][tensor][tile]) is None:
                    continue
                if blob[1] == length:  # a dense tile hides all before it
                    dense, size, chain = blob[0], length, []
                else:
                    chain.append(blob[0])
                    size += blob[1]
            yield TileTask(place, digest, length, dense, tuple(chain), size)


def places(manifest: Manifest) -> Iterator[Place]:
    """All tiles of a manifest in order."""
    for tensor, entry in enumerate(manifest.tensors):
        for tile in range(len(entry.digests)):
            yield tensor, tile


def _all(ways: Sequence[Way]) -> Iterator[Patch]:
    for way in ways:
        yield from way.patches


def _blobs(sizes: Sequence[int], digests: Sequence[bytes]) -> list[tuple[bytes, int] | None]:
    rest = iter(digests)
    return [(next(rest), size) if size else None for size in sizes]
