"""Finds the cheapest ways to a version: by patches from a version that the requester holds, or from a keyframe.

A stream's versions are nodes, its patches edges, and a way costs the bytes to fetch for it.
"""

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from ebbtide.types.weights import FetchPath


class PatchStep(Struct, frozen=True):
    """A patch of `size` bytes that changes `changed` of `elements` (0: not known)."""

    base: int
    version: int
    size: int
    changed: int = 0
    elements: int = 0


class PathLeg(Struct, frozen=True):
    """The rest of the cheapest way from a version."""

    size: int
    steps: int
    after: int  # the next version


def legs_to(wanted: int, steps: Iterable[PatchStep]) -> dict[int, PathLeg]:
    """Find the cheapest way to `wanted` from each version that has one (Dijkstra 1959); of equals the shortest."""
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
    """The versions after `start` on its way, `wanted` last; none if `start` is it."""
    via: list[int] = []
    while start != wanted:
        start = legs[start].after
        via.append(start)
    return tuple(via)


def find_paths(
    keyframes: Mapping[int, int], steps: Iterable[PatchStep], wanted: int, have: Iterable[int], *, scratch: bool = False
) -> list[FetchPath]:
    """Find ways to `wanted`, cheapest first: one from each version of `have` that has one, and the cheapest from an
    keyframe if `scratch` asks for it, or it is cheaper than all others. `keyframes`: bytes of their dense tiles."""
    legs = legs_to(wanted, steps)
    ways = [_way(start, wanted, legs, keyframes, 0) for start in sorted(set(have)) if start in legs]
    reached = [start for start in keyframes if start in legs]
    if reached:
        best = min(reached, key=lambda start: (keyframes[start] + legs[start].size, legs[start].steps, -start))
        way = _way(best, wanted, legs, keyframes, keyframes[best])
        # The requester may hold the start in part: then that way names the keyframe already.
        held = any(other.start == best for other in ways)
        if not held and (scratch or all(way.size < other.size for other in ways)):
            ways.append(way)
    return sorted(ways, key=lambda way: (way.size, len(way.via), way.start))


def _way(start: int, wanted: int, legs: Mapping[int, PathLeg], keyframes: Mapping[int, int], dense: int) -> FetchPath:
    via = passed(start, wanted, legs)
    return FetchPath(start=start, keyframe=start in keyframes, via=via, size=dense + legs[start].size)


def whole_versions(keyframes: Iterable[int], steps: Iterable[PatchStep]) -> set[int]:
    """The versions that a requester without any can reach: keyframes, and those that patches lead to from them."""
    out: dict[int, list[int]] = {}
    for step in steps:
        out.setdefault(step.base, []).append(step.version)
    return _reach(keyframes, out)


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


def wants_keyframe(way: FetchPath, dense: int, room: int, *, every: int, share: float) -> bool:
    """Whether the newest version, with this cheapest `way` from a keyframe, should become a keyframe.

    It should when the way has `every` patches, when these exceed `share` of the `dense` bytes, or when `room` for dense
    tiles is running out: later, versions could be neither kept nor dropped.
    """
    size = way.size - dense
    return bool(way.via) and (len(way.via) >= every or size > share * dense or dense <= room < 1.5 * dense)


#: Assumed bytes per second of a requester that has not measured its link: 1 Gbit/s.
_ASSUMED_RATE = 125e6
#: The estimated time with a composed patch must be below this share of the chain's.
_MARGIN = 0.9


def composed_size(chain: Sequence[PatchStep]) -> int:
    """Estimate the bytes of a patch that does all of `chain`, from its densities; at most the chain's own.

    Changes count as independent draws, and positions as coded at their entropy; a changed value takes the bits of the
    chain's. Real steps often change the same elements again, so that the patch is usually smaller.
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
    """Whether a requester that fetches at `bytes_per_s` (0: unknown) gets a composed patch sooner than the chain, if
    the relay composes `composing_bytes_per_s` of chains."""
    if len(chain) < 2:
        return False
    rate = bytes_per_s or _ASSUMED_RATE
    total = sum(step.size for step in chain)
    return total / composing_bytes_per_s + composed_size(chain) / rate < _MARGIN * total / rate


def saved_s(chain: Sequence[PatchStep], bytes_per_s: float) -> float:
    """Estimate the seconds of fetching that the composed patch saves."""
    return (sum(step.size for step in chain) - composed_size(chain)) / (bytes_per_s or _ASSUMED_RATE)


def _gap_bits(density: float) -> float:
    """The entropy of the positions of independent draws, in bits for each draw."""
    if density >= 1:
        return 0.0
    rest = 1 - density
    return -(density * math.log2(density) + rest * math.log2(rest)) / density
