"""The cheapest ways to a version: by patches from what a requester holds, or from an anchor's dense tiles.

A stream's versions are nodes, its patches edges, and the cost of a way is the bytes to be fetched for it.
"""

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from ebbtide.types.weights import FoundWay


class PatchStep(Struct, frozen=True):
    """A patch of `size` bytes from `base` to `version`, which changes `changed` of `elements` (0: not known)."""

    base: int
    version: int
    size: int
    changed: int = 0
    elements: int = 0


class PathLeg(Struct, frozen=True):
    """How the cheapest way goes on from a version: its bytes, its patches and the version after this one."""

    size: int
    steps: int
    after: int


def legs_to(wanted: int, steps: Iterable[PatchStep]) -> dict[int, PathLeg]:
    """The cheapest way to `wanted` from each version that has one (Dijkstra 1959); of equals the one of fewer steps."""
    into: dict[int, list[PatchStep]] = {}
    for step in steps:
        into.setdefault(step.version, []).append(step)
    found: dict[int, PathLeg] = {}
    queue = [(0, 0, wanted, wanted)]
    while queue:
        size, count, version, after = heapq.heappop(queue)
        if version in found:
            continue
        found[version] = PathLeg(size, count, after)
        for step in into.get(version, ()):
            if step.base not in found:
                heapq.heappush(queue, (size + step.size, count + 1, step.base, version))
    return found


def passed(start: int, wanted: int, legs: Mapping[int, PathLeg]) -> tuple[int, ...]:
    """The versions behind `start` on its way, `wanted` last; none if `start` is it."""
    via: list[int] = []
    while start != wanted:
        start = legs[start].after
        via.append(start)
    return tuple(via)


def find_ways(
    anchors: Mapping[int, int], steps: Iterable[PatchStep], wanted: int, have: Iterable[int], *, scratch: bool = False
) -> list[FoundWay]:
    """Ways to `wanted`, cheapest first; none if there is none.

    `anchors` maps versions to bytes of their dense tiles. One way from each version of `have` that has one, and the
    cheapest from an anchor, if that is asked for (`scratch`), is cheaper than all others, or is the only one.
    """
    legs = legs_to(wanted, steps)
    ways = [_way(start, wanted, legs, anchors, 0) for start in sorted(set(have)) if start in legs]
    reached = [start for start in anchors if start in legs]
    if reached:
        best = min(reached, key=lambda start: (anchors[start] + legs[start].size, legs[start].steps, -start))
        way = _way(best, wanted, legs, anchors, anchors[best])
        # A start that the requester holds in part: its way tells of the anchor already.
        held = any(other.start == best for other in ways)
        if not held and (scratch or all(way.size < other.size for other in ways)):
            ways.append(way)
    return sorted(ways, key=lambda way: (way.size, len(way.via), way.start))


def _way(start: int, wanted: int, legs: Mapping[int, PathLeg], anchors: Mapping[int, int], dense: int) -> FoundWay:
    via = passed(start, wanted, legs)
    return FoundWay(start=start, anchor=start in anchors, via=via, size=dense + legs[start].size)


def whole_versions(anchors: Iterable[int], steps: Iterable[PatchStep]) -> set[int]:
    """The versions that can be had from nothing: anchors, and what patches lead to from them."""
    out: dict[int, list[int]] = {}
    for step in steps:
        out.setdefault(step.base, []).append(step.version)
    return _reach(anchors, out)


def passages(whole: Iterable[int], steps: Iterable[PatchStep]) -> set[int]:
    """`whole`, and all versions from which patches lead to one of them."""
    back: dict[int, list[int]] = {}
    for step in steps:
        back.setdefault(step.version, []).append(step.base)
    return _reach(whole, back)


def _reach(starts: Iterable[int], neighbours: Mapping[int, Sequence[int]]) -> set[int]:
    reached = set(starts)
    waiting = list(reached)
    while waiting:
        for version in neighbours.get(waiting.pop(), ()):
            if version not in reached:
                reached.add(version)
                waiting.append(version)
    return reached


def wants_anchor(way: FoundWay, dense: int, room: int, *, every: int, share: float) -> bool:
    """Whether the newest version should become an anchor, whose cheapest `way` from one is this.

    When the way has `every` patches, when these weigh more than `share` of the `dense` bytes, or while there is still
    `room` for dense tiles but hardly so: later, what was published could neither be kept nor let go.
    """
    size = way.size - dense
    return bool(way.via) and (len(way.via) >= every or size > share * dense or dense <= room < 1.5 * dense)


#: Bytes per second taken for a requester that has not measured its link: 1 Gbit/s.
_ASSUMED_RATE = 125e6
#: Composing must save this share of the time at least: what is saved is estimated.
_MARGIN = 0.9


def composed_size(chain: Sequence[PatchStep]) -> int:
    """Bytes that a patch doing all of `chain` is expected to have, given densities; at most the chain's own.

    Takes changes as independent draws, so that an element is unchanged if no step draws it, and codes positions at
    their entropy; the bits of a changed value are those that the chain's changes have now. Real steps change some
    elements again and again, so that less comes out as a rule.
    """
    total = sum(step.size for step in chain)
    if not all(0 < step.changed <= step.elements for step in chain):
        return total
    elements = max(step.elements for step in chain)
    union = 1 - math.prod(1 - step.changed / step.elements for step in chain)
    values = sum(max(0.0, step.size * 8 - step.changed * _gap_bits(step.changed / step.elements)) for step in chain)
    bits = values / sum(step.changed for step in chain) + _gap_bits(union)
    return min(total, int(elements * union * bits / 8))


def worth_composing(chain: Sequence[PatchStep], bytes_per_s: float, composing_bytes_per_s: float) -> bool:
    """Whether the requester, fetching at `bytes_per_s` (0: unknown), has a composed patch sooner than the chain.

    `composing_bytes_per_s`: bytes of chains that this relay composes per second.
    """
    if len(chain) < 2:
        return False
    rate = bytes_per_s or _ASSUMED_RATE
    total = sum(step.size for step in chain)
    return total / composing_bytes_per_s + composed_size(chain) / rate < _MARGIN * total / rate


def saved_s(chain: Sequence[PatchStep], bytes_per_s: float) -> float:
    """Seconds of fetching that the composed patch is expected to spare."""
    return (sum(step.size for step in chain) - composed_size(chain)) / (bytes_per_s or _ASSUMED_RATE)


def _gap_bits(density: float) -> float:
    """Entropy of the positions of independent draws, bits for each drawn."""
    if density >= 1:
        return 0.0
    rest = 1 - density
    return -(density * math.log2(density) + rest * math.log2(rest)) / density
