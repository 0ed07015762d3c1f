"""Plans what a relay drops by count, age and bytes: nothing that a kept version needs, and late what live holders need.

A version is *kept* for its own sake, or stays because a path leads through it. Paths lead from version to version of a
policy of a run. Every kept version has a path from a keyframe. Each version of a live holder has a path by patches to
the newest, if that costs less than a keyframe and while room allows. Blobs that several versions and patches share
count once.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from functools import partial
from typing import Any, TypeAlias

from msgspec import Struct

from ebbtide.weight_relay.version_paths import (
    PatchStep,
    PathLeg,
    find_paths,
    legs_to,
    passed,
    whole_versions,
)

#: A run, and one of its policies.
Stream: TypeAlias = tuple[str, str]
#: A version of a stream.
Node: TypeAlias = tuple[Stream, int]


class HeldVersion(Struct, frozen=True, kw_only=True):
    """A committed version."""

    stream: Stream
    version: int
    tiles: Mapping[bytes, int] = {}  # bytes of its dense tiles by digest, if it is a keyframe
    record: Mapping[bytes, int] = {}  # bytes of its own file, which takes room as blobs do
    keyframe: bool = True
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
        self._keyframes = {
            item.version: item.size or sum(item.tiles.values()) for item in versions.values() if item.keyframe
        }
        self.whole = whole_versions(self._keyframes, self._steps.values())
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
            way = next(iter(find_paths(self._keyframes, self._steps.values(), version, ())))
            self._dense.add(way.start)
            self._stay(way.start, way.via)
        self._sources = set(self._nodes)
        newest, legs = max(self.kept, default=0), self.live_legs()
        for version in legs.keys() & self.live:
            self._stay(version, passed(version, newest, legs))
        among = self.kept | (self.live & self._nodes)
        self._edges |= {ends for ends in self._steps if ends[0] in among and ends[1] in among}

    def live_legs(self, *more: PatchStep) -> dict[int, PathLeg]:
        """Ways to the newest kept version that are cheaper than one from a keyframe. `more`: further patches."""
        steps = [*self._steps.values(), *more]
        legs = legs_to(max(self.kept), steps) if self.kept else {}
        dense = [size + legs[version].size for version, size in self._keyframes.items() if version in legs]
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
        lost = not self.whole <= whole_versions(self._keyframes, self._steps.values())
        if lost or self.live & (self.live_legs(step).keys() - self.live_legs().keys()):
            self._steps[ends] = step

    def shed_live(self, version: int) -> None:
        """Leave the live holders of a version to keyframes."""
        self.live.discard(version)

    # -- what goes -----------------------------------------------------------------------------------------------

    def evicted(self) -> list[HeldVersion]:
        return [self.versions[version] for version in sorted(self.versions.keys() - self._nodes)]

    def thinned(self) -> list[HeldVersion]:
        return [self.versions[version] for version in sorted((self._nodes & self._keyframes.keys()) - self._dense)]

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


#: Ancestors that no rule keeps may exceed the age limit by this factor before a keyframe is made.
_AGED = 1.5


class RetentionRules(Struct, frozen=True, kw_only=True):
    """The limits of a relay."""

    keep_versions: int  # newest versions of each stream
    budget_bytes: int
    abandoned_s: float  # idle time after which a stream may lose its newest version too
    max_age_s: float = 0.0  # 0: any age
    run_quota_bytes: int = 0  # 0: no quota
    block_bytes: int = 1  # that the smallest blob takes on disk


class RetentionPlan(Struct, frozen=True, kw_only=True):
    """What to drop, and what is then still too much."""

    evict: tuple[HeldVersion, ...]
    thin: tuple[HeldVersion, ...] = ()  # keyframes that a path leads through stay, without their dense tiles
    patches: tuple[HeldPatch, ...] = ()
    excess_bytes: int = 0  # by which the rest exceeds the budget
    over_quota: Mapping[str, int] = {}  # bytes by which the rest exceeds the quota, by run
    keyframes: tuple[Node, ...] = ()  # kept versions that should become keyframes, so that their ancestors can go


def plan_retention(
    held: Iterable[HeldVersion],
    patches: Iterable[HeldPatch] = (),
    *,
    rules: RetentionRules,
    incoming: Mapping[str, Mapping[bytes, int]],
    needed: Set[Node] = frozenset(),
    pinned: Set[Node] = frozenset(),
) -> RetentionPlan:
    """Plan so that what stays fits, with the blobs `incoming` by run, into the budget and each run's quota.

    If it does not fit, composed patches go first. Then go kept versions that are not the newest of their stream: those
    that are safe elsewhere first, then the longest idle. Then the ways of `needed` versions, which live holders have,
    dearest first: a keyframe serves these holders from then on. Last goes the newest of abandoned streams, without live
    holders. The newest of other streams, and what `pinned` versions (bases of publishes under way) need, stays.
    """
    ledgers = _ledgers(held, patches, rules, needed, pinned)
    over: dict[str, int] = {}
    shed = False
    if rules.run_quota_bytes:
        for run in {stream[0] for stream in ledgers} | incoming.keys():
            own = [ledger for stream, ledger in ledgers.items() if stream[0] == run]
            excess, some = _press(own, incoming.get(run, {}), rules.run_quota_bytes, rules.block_bytes)
            shed = shed or some
            if excess:
                over[run] = excess
    blobs = {digest: size for some_blobs in incoming.values() for digest, size in some_blobs.items()}
    excess, some = _press(list(ledgers.values()), blobs, rules.budget_bytes, rules.block_bytes)
    pressed = shed or some or excess > 0 or bool(over)
    return RetentionPlan(
        evict=tuple(item for ledger in ledgers.values() for item in ledger.evicted()),
        thin=tuple(item for ledger in ledgers.values() for item in ledger.thinned()),
        patches=tuple(item for ledger in ledgers.values() for item in ledger.dropped()),
        excess_bytes=excess,
        over_quota=over,
        keyframes=tuple(_keyframes(ledgers.values(), rules, pressed=pressed)),
    )


def _ledgers(
    held: Iterable[HeldVersion],
    patches: Iterable[HeldPatch],
    rules: RetentionRules,
    needed: Set[Node],
    pinned: Set[Node],
) -> dict[Stream, RetainedLedger]:
    versions: dict[Stream, dict[int, HeldVersion]] = {}
    for item in held:
        versions.setdefault(item.stream, {})[item.version] = item
    edges: dict[Stream, list[HeldPatch]] = {}
    for patch in patches:
        edges.setdefault(patch.stream, []).append(patch)
    ledgers: dict[Stream, RetainedLedger] = {}
    for stream in sorted(versions):
        own = versions[stream]
        ledger = RetainedLedger(
            own,
            edges.get(stream, []),
            live={version for other, version in needed if other == stream},
            pinned={version for other, version in pinned if other == stream},
        )
        newest_first = sorted(ledger.whole, reverse=True)
        for version in newest_first[: rules.keep_versions]:
            if version == newest_first[0] or not rules.max_age_s or own[version].age_s <= rules.max_age_s:
                ledger.kept.add(version)
        idle = all(item.idle_s >= rules.abandoned_s for item in own.values())
        ledger.abandoned = bool(newest_first) and idle and not ledger.live
        ledger.settle()
        ledgers[stream] = ledger
    return ledgers


def _press(ledgers: list[RetainedLedger], incoming: Mapping[bytes, int], limit: int, block: int) -> tuple[int, bool]:
    """Shed until the ledgers fit with `incoming` into `limit`. Returns the excess bytes, and whether any shed."""
    groups = [incoming, *(blobs for ledger in ledgers for blobs in ledger.blobs())]
    if sum(sum(blobs.values()) + block * len(blobs) for blobs in groups) <= limit:
        return 0, False  # it fits even if no blob is shared
    stock = RetainedStock(block)
    stock.add(groups)
    shed = False
    for action in _sheddings(ledgers):
        if stock.bytes <= limit:
            break
        ledger, act = action
        before = {id(blobs): blobs for blobs in ledger.blobs()}
        act()
        ledger.settle()
        after = {id(blobs): blobs for blobs in ledger.blobs()}
        stock.add(after[key] for key in after.keys() - before.keys())
        stock.remove(before[key] for key in before.keys() - after.keys())
        shed = True
    return max(0, stock.bytes - limit), shed


def _sheddings(ledgers: list[RetainedLedger]) -> Iterable[tuple[RetainedLedger, Callable[[], None]]]:
    """Yield what may go to make room, first to last."""
    composed = [(patch, ledger) for ledger in ledgers for patch in ledger.composed()]
    for patch, ledger in sorted(composed, key=lambda item: (-item[0].idle_s, item[0].version, item[0].base)):
        yield ledger, partial(ledger.shed_patch, patch)
    older = [(ledger.versions[version], ledger) for ledger in ledgers for version in sorted(ledger.kept)[:-1]]
    for item, ledger in sorted(older, key=lambda item: (not item[0].elsewhere, -item[0].idle_s, item[0].version)):
        yield ledger, partial(ledger.kept.discard, item.version)
    live = [
        (leg.size, version, ledger)
        for ledger in ledgers
        for version, leg in ledger.live_legs().items()
        if version in ledger.live
    ]
    for _, version, ledger in sorted(live, key=lambda item: (-item[0], item[1])):
        yield ledger, partial(ledger.shed_live, version)
    forsaken = [ledger for ledger in ledgers if ledger.abandoned]
    for ledger in sorted(forsaken, key=lambda ledger: -min(item.idle_s for item in ledger.versions.values())):
        yield ledger, ledger.kept.clear


def _keyframes(ledgers: Iterable[RetainedLedger], rules: RetentionRules, *, pressed: bool) -> Iterable[Node]:
    for ledger in ledgers:
        if not ledger.kept or not (ancestors := ledger.ancestors()):
            continue
        oldest = min(ledger.kept)
        aged = rules.max_age_s and max(item.age_s for item in ancestors) > _AGED * rules.max_age_s
        if (pressed or aged) and not ledger.versions[oldest].keyframe:
            yield ledger.versions[oldest].stream, oldest
