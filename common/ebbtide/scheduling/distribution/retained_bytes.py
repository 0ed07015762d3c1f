"""Works out what stays of a stream when some of its versions are kept, and counts its bytes."""

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from typing import Any, TypeAlias

from msgspec import Struct

from ebbtide.scheduling.distribution.version_paths import (
    PatchStep,
    PathLeg,
    find_ways,
    legs_to,
    passed,
    whole_versions,
)

Stream: TypeAlias = tuple[str, str]
#: A version of a stream.
Node: TypeAlias = tuple[Stream, int]


class HeldVersion(Struct, frozen=True, kw_only=True):
    """A committed version."""

    stream: Stream
    version: int
    tiles: Mapping[bytes, int] = {}  # bytes of its dense tiles by digest, if it is an anchor
    record: Mapping[bytes, int] = {}  # bytes of its own file, which takes room as blobs do
    anchor: bool = True
    size: int = 0  # bytes of its dense tiles, held or not
    idle_s: float = 0.0  # since it was published or read
    age_s: float = 0.0  # since it came
    elsewhere: bool = False  # whether a lasting holder, on no spot machine, has all of it too


class HeldPatch(Struct, frozen=True, kw_only=True):
    """A patch between two versions."""

    stream: Stream
    base: int
    version: int
    blobs: Mapping[bytes, int] = {}  # bytes by digest
    record: Mapping[bytes, int] = {}  # bytes of its own file
    composed: bool = False  # by the relay, which can do it again
    idle_s: float = 0.0


class RetainedLedger:
    """One stream while its retention is planned. After a change of `kept`, call `settle`."""

    def __init__(
        self, versions: Mapping[int, HeldVersion], patches: Iterable[HeldPatch], *, live: Set[int], pinned: Set[int]
    ) -> None:
        self.versions = versions
        self._all = list(patches)
        self._patches = {
            (patch.base, patch.version): patch
            for patch in self._all
            if patch.base in versions and patch.version in versions
        }
        self._steps = {ends: PatchStep(*ends, sum(patch.blobs.values())) for ends, patch in self._patches.items()}
        self._anchors = {
            item.version: item.size or sum(item.tiles.values()) for item in versions.values() if item.anchor
        }
        self.whole = whole_versions(self._anchors, self._steps.values())
        self.live = set(live & versions.keys())
        self._pinned = pinned & self.whole
        self.kept: set[int] = set()
        self.abandoned = False
        self._nodes: set[int] = set()
        self._sources: set[int] = set()
        self._dense: set[int] = set()
        self._edges: set[tuple[int, int]] = set()

    def settle(self) -> None:
        """Work out what `kept` and pinned versions and live holders need."""
        self._nodes, self._dense, self._edges = set(), set(), set()
        for version in self.kept | self._pinned:
            way = next(iter(find_ways(self._anchors, self._steps.values(), version, ())))
            self._dense.add(way.start)
            self._stay(way.start, way.via)
        self._sources = set(self._nodes)
        newest, legs = max(self.kept, default=0), self.live_legs()
        for version in legs.keys() & self.live:
            self._stay(version, passed(version, newest, legs))
        among = self.kept | (self.live & self._nodes)
        self._edges |= {ends for ends in self._steps if ends[0] in among and ends[1] in among}

    def live_legs(self, *more: PatchStep) -> dict[int, PathLeg]:
        """Ways to the newest kept version that are cheaper than one from an anchor. `more`: further patches."""
        steps = [*self._steps.values(), *more]
        legs = legs_to(max(self.kept), steps) if self.kept else {}
        dense = [size + legs[version].size for version, size in self._anchors.items() if version in legs]
        return {version: leg for version, leg in legs.items() if leg.size < min(dense)}

    def _stay(self, start: int, via: tuple[int, ...]) -> None:
        self._nodes |= {start, *via}
        self._edges |= set(zip((start, *via), via, strict=False))

    def blobs(self) -> list[Mapping[bytes, int]]:
        """The blobs and records of all that stays."""
        dense = [self.versions[version].tiles for version in self._dense]
        patches = [self._patches[ends] for ends in self._edges]
        records = [self.versions[version].record for version in self._nodes]
        return dense + records + [blobs for patch in patches for blobs in (patch.blobs, patch.record)]

    def composed(self) -> list[HeldPatch]:
        return [self._patches[ends] for ends in self._steps if self._patches[ends].composed]

    def shed_patch(self, patch: HeldPatch) -> None:
        """Drop a patch, unless a version that has to stay has no other way."""
        ends = patch.base, patch.version
        step = self._steps.pop(ends)
        lost = not self.whole <= whole_versions(self._anchors, self._steps.values())
        if lost or self.live & (self.live_legs(step).keys() - self.live_legs().keys()):
            self._steps[ends] = step

    def shed_live(self, version: int) -> None:
        """Leave the live holders of a version to anchors."""
        self.live.discard(version)

    # -- what goes -----------------------------------------------------------------------------------------------

    def evicted(self) -> list[HeldVersion]:
        return [self.versions[version] for version in sorted(self.versions.keys() - self._nodes)]

    def thinned(self) -> list[HeldVersion]:
        return [self.versions[version] for version in sorted((self._nodes & self._anchors.keys()) - self._dense)]

    def dropped(self) -> list[HeldPatch]:
        return [patch for patch in self._all if (patch.base, patch.version) not in self._edges]

    def ancestors(self) -> list[HeldVersion]:
        """The versions that stay only because kept ones need them."""
        return [self.versions[version] for version in sorted(self._sources - self.kept - self.live - self._pinned)]


class RetainedStock:
    """Counts the bytes of distinct blobs in use; each takes at least `block` bytes."""

    def __init__(self, block: int = 1) -> None:
        self._block = block
        self._users: Counter[bytes] = Counter()
        self.bytes = 0

    def add(self, groups: Iterable[Mapping[bytes, int]]) -> None:
        for digest, size in _items(groups):
            self.bytes += 0 if self._users[digest] else max(size, self._block)
            self._users[digest] += 1

    def remove(self, groups: Iterable[Mapping[bytes, int]]) -> None:
        for digest, size in _items(groups):
            self._users[digest] -= 1
            self.bytes -= 0 if self._users[digest] else max(size, self._block)


def _items(groups: Iterable[Mapping[bytes, int]]) -> Iterable[Any]:
    for group in groups:
        yield from group.items()
