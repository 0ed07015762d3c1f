"""What one pull has to fetch and do, in pieces that fit into memory.

Tiles that want the same blobs are done together, so that each blob is fetched once.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from ebbtide.errors import ChunkCorrupt
from ebbtide.types.weights import Manifest
from ebbtide.weights import Place, Planner, TileTask, Way, blob_sizes, tile_sizes

#: Blobs of one batch, which one stream holds at a time: large enough to keep a link busy between two questions, small
#: enough that those who read from us are not far behind.
_MOST_BYTES: Final = 8 << 20
_LEAST_BYTES: Final = 1 << 20
#: Tiles of one batch, so that progress is seen also where patches are tiny.
_MOST_TILES: Final = 512


class FetchBatch:
    """Tasks, and the blobs of them that are wanted, have come, and were verified. Invariant: nothing is kept that was
    not asked for, or has another size than the lists say."""

    def __init__(self, groups: Sequence[Sequence[TileTask]], sizes: Mapping[bytes, int]) -> None:
        self.groups = list(groups)
        self.sizes = {digest: sizes[digest] for group in groups for digest in group[0].blobs}
        #: Tiles that are the wanted version's as they come: a mirror will have them.
        self.dense = {group[0].dense for group in groups if group[0].dense == group[0].digest}
        self.verified: dict[bytes, bytes] = {}
        self.fresh: dict[bytes, bytes] = {}
        self.fresh_bytes = 0
        self.lacking: set[str] = set()  # addresses that have not got all of it

    @property
    def missing(self) -> list[bytes]:
        """Digests still to be fetched, in order."""
        return [digest for digest in self.sizes if digest not in self.verified and digest not in self.fresh]

    def take(self, digest: bytes, data: bytes) -> None:
        """A blob has come, of the right size if not the right one. Raises `ChunkCorrupt` if it was not asked for."""
        if self.sizes.get(digest) != len(data) or digest in self.fresh or digest in self.verified:
            raise ChunkCorrupt(f"a blob of {len(data)} bytes came that was not asked for")
        self.fresh[digest] = data
        self.fresh_bytes += len(data)

    def take_fresh(self) -> dict[bytes, bytes]:
        """What has come since the last time, to be verified."""
        fresh, self.fresh, self.fresh_bytes = self.fresh, {}, 0
        return fresh

    def take_ready(self) -> list[TileTask]:
        """The tasks whose blobs are all verified, once each."""
        ready: list[TileTask] = []
        waiting: list[Sequence[TileTask]] = []
        for group in self.groups:
            if all(digest in self.verified for digest in group[0].blobs):
                ready += group
            else:
                waiting.append(group)
        self.groups = waiting
        return ready


class FetchWork:
    """The tasks of one plan."""

    def __init__(
        self, target: Manifest, ways: Sequence[Way], places: Iterable[Place], held: dict[Place, bytes]
    ) -> None:
        """Plan for `places`; takes time, so do it in a thread."""
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
        """The tasks in manifest order, so that `streams` of them at once share the work to the end."""
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
    """Every blob of some ways, and its bytes."""
    sizes: dict[bytes, int] = {}
    for way in ways:
        if way.anchor:
            sizes |= tile_sizes(way.start)
        for patch in way.patches:
            sizes |= blob_sizes(patch)
    return sizes
