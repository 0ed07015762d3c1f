"""Plans what a relay drops by count, age and bytes: nothing that a kept version needs, and late what live holders need.

A stream is one policy of one run. A version is *kept* for its own sake, or stays as a passage. Every kept version has
a way from an anchor. Each version of a live holder has a way by patches to the newest, if that costs less than an
anchor and while room allows. Blobs that several versions and patches share count once.
"""

from collections.abc import Callable, Iterable, Mapping, Set
from functools import partial

from msgspec import Struct

from ebbtide.scheduling.distribution.retained_bytes import (
    HeldPatch,
    HeldVersion,
    Node,
    RetainedLedger,
    RetainedStock,
    Stream,
)

#: Ancestors that no rule keeps may exceed the age limit by this factor before an anchor is made.
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
    thin: tuple[HeldVersion, ...] = ()  # anchors that stay as passages, without their dense tiles
    patches: tuple[HeldPatch, ...] = ()
    excess_bytes: int = 0  # by which the rest exceeds the budget
    over_quota: Mapping[str, int] = {}  # bytes by which the rest exceeds the quota, by run
    anchors: tuple[Node, ...] = ()  # kept versions that should become anchors, so that their ancestors can go


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
    dearest first: an anchor serves these holders from then on. Last goes the newest of abandoned streams, without live
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
        anchors=tuple(_anchors(ledgers.values(), rules, pressed=pressed)),
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


def _anchors(ledgers: Iterable[RetainedLedger], rules: RetentionRules, *, pressed: bool) -> Iterable[Node]:
    for ledger in ledgers:
        if not ledger.kept or not (ancestors := ledger.ancestors()):
            continue
        oldest = min(ledger.kept)
        aged = rules.max_age_s and max(item.age_s for item in ancestors) > _AGED * rules.max_age_s
        if (pressed or aged) and not ledger.versions[oldest].anchor:
            yield ledger.versions[oldest].stream, oldest
