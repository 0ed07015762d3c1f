"""Plans which blobs to fetch for each tile of a wanted version, whatever the reader holds already.

A *way* leads to the wanted version from a start, through patches one after another; a keyframe's dense tiles can be
fetched too. A tile takes the cheapest way that starts at its present bytes, known by their digest. Tiles that a dead
process left half updated, or that differ for any other reason, are therefore repaired like all others.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from msgspec import Struct

from ebbtide.types.weights import Manifest, Patch
from ebbtide.weights.tiles import tile_size

#: (tensor, tile): the index of an entry in its manifest, and of a tile in its entry.
Place: TypeAlias = tuple[int, int]


class Way(Struct, frozen=True):
    """A start, and the patches that lead from it to the wanted version, in order."""

    start: Manifest
    patches: tuple[Patch, ...]
    keyframe: bool  # the dense tiles of `start` can be fetched


class TileTask(Struct, frozen=True):
    """The blobs that turn a tile into the wanted one."""

    place: Place
    digest: bytes  # of the finished tile
    length: int  # its bytes
    dense: bytes  # digest of the dense tile to start from; empty: start from the present bytes
    patches: tuple[bytes, ...]  # digests of tile patches, applied in this order
    cost: int  # bytes to fetch

    @property
    def blobs(self) -> tuple[bytes, ...]:
        """The digests of all blobs to fetch."""
        return (self.dense, *self.patches) if self.dense else self.patches


class Planner:
    """Plans for one wanted version. The manifests and patches of its ways are checked and share its geometry."""

    def __init__(self, target: Manifest, ways: Sequence[Way]) -> None:
        self._target = target
        self._ways = ways
        # For each patch and tensor: digest and size of each tile's blob, or None for a tile that stays.
        self._blobs = {
            id(patch): [_blobs(tensor.sizes, tensor.digests) for tensor in patch.tensors] for patch in _all(ways)
        }

    def tasks(self, places: Iterable[Place], held: "dict[Place, bytes]") -> Iterator[TileTask | Place]:
        """Plan each of `places`, given the digests `held` there; yields nothing for tiles that are right already.

        Yields the place itself if no way leads to it.
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
            if now != start and not way.keyframe:
                continue
            dense = b"" if now == start else start
            size = length if dense else 0
            chain: list[bytes] = []
            for patch in way.patches:
                if (blob := self._blobs[id(patch)][tensor][tile]) is None:
                    continue
                if blob[1] == length:  # a dense tile replaces everything before it
                    dense, size, chain = blob[0], length, []
                else:
                    chain.append(blob[0])
                    size += blob[1]
            yield TileTask(place, digest, length, dense, tuple(chain), size)


def places(manifest: Manifest) -> Iterator[Place]:
    """Yield all tiles of a manifest in order."""
    for tensor, entry in enumerate(manifest.tensors):
        for tile in range(len(entry.digests)):
            yield tensor, tile


def _all(ways: Sequence[Way]) -> Iterator[Patch]:
    for way in ways:
        yield from way.patches


def _blobs(sizes: Sequence[int], digests: Sequence[bytes]) -> list[tuple[bytes, int] | None]:
    rest = iter(digests)
    return [(next(rest), size) if size else None for size in sizes]
