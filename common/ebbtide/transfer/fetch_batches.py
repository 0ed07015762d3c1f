"""Splits the work of one pull into batches that fit into memory.

Tiles that are made of the same blobs share a batch, so that each blob is fetched once.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from ebbtide.transfer.blob_fetcher import BlobBatch
from ebbtide.types.weights import Manifest
from ebbtide.weights import Place, Planner, TileTask, Way, blob_sizes, tile_sizes

#: Bytes of one batch, which one stream holds at a time: large enough to keep a link busy between two requests, small
#: enough that peers that read from this host are not far behind.
_MOST_BYTES: Final = 8 << 20
_LEAST_BYTES: Final = 1 << 20
#: Tiles of one batch, so that progress shows even where patches are tiny.
_MOST_TILES: Final = 512


class FetchBatch(BlobBatch):
    """Tiles to make, and the blobs that they need."""

    def __init__(self, groups: Sequence[Sequence[TileTask]], sizes: Mapping[bytes, int]) -> None:
        """`groups`: the tiles of each are made of the same blobs."""
        super().__init__({digest: sizes[digest] for group in groups for digest in group[0].blobs})
        self._groups = list(groups)
        #: Blobs that are tiles of the wanted version as they come: the mirror will have them.
        self.dense = {group[0].dense for group in groups if group[0].dense == group[0].digest}
        self.verified: dict[bytes, bytes] = {}

    def take_ready(self) -> list[TileTask]:
        """Remove the tiles whose blobs are all verified."""
        ready: list[TileTask] = []
        waiting: list[Sequence[TileTask]] = []
        for group in self._groups:
            if all(digest in self.verified for digest in group[0].blobs):
                ready += group
            else:
                waiting.append(group)
        self._groups = waiting
        return ready


class FetchWork:
    """The tiles that one plan makes, and the places that it cannot reach."""

    def __init__(
        self, target: Manifest, ways: Sequence[Way], places: Iterable[Place], held: dict[Place, bytes]
    ) -> None:
        """Plan for `places`. It takes time: do it in a thread."""
        groups: dict[tuple[bytes, ...], list[TileTask]] = {}
        self.lost: list[Place] = []
        for found in Planner(target, ways).tasks(places, held):
            if isinstance(found, TileTask):
                groups.setdefault(found.blobs, []).append(found)
            else:
                self.lost.append(found)
        self._groups = list(groups.values())
        known = _sizes(ways)
        self.sizes = {digest: known[digest] for blobs in groups for digest in blobs}

    @property
    def tiles(self) -> int:
        return sum(map(len, self._groups))

    @property
    def bytes(self) -> int:
        return sum(self.sizes.values())

    def batches(self, streams: int) -> Iterator[FetchBatch]:
        """Yield the tasks in the manifest's order, in pieces that `streams` share until the end."""
        most = min(_MOST_BYTES, max(_LEAST_BYTES, self.bytes // (4 * streams)))
        groups: list[list[TileTask]] = []
        size = tiles = 0
        for group in self._groups:
            if groups and (size + group[0].cost > most or tiles + len(group) > _MOST_TILES):
                yield FetchBatch(groups, self.sizes)
                groups, size, tiles = [], 0, 0
            groups.append(group)
            size += group[0].cost
            tiles += len(group)
        if groups:
            yield FetchBatch(groups, self.sizes)


def _sizes(ways: Iterable[Way]) -> dict[bytes, int]:
    """Return the bytes of every blob of some ways."""
    sizes: dict[bytes, int] = {}
    for way in ways:
        if way.anchor:
            sizes |= tile_sizes(way.start)
        for patch in way.patches:
            sizes |= blob_sizes(patch)
    return sizes
