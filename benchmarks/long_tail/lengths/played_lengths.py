"""Plays steps of drawn lengths on equally fast slots up to a moment, and tells what is known then."""

from collections.abc import Iterator, Sequence
from heapq import heapify, heapreplace
from typing import NamedTuple

from ebbtide.coordinator.forecasts.length_learner import UnfinishedGroup


class HeldBack(NamedTuple):
    """A group that is not whole at a moment. `truth`: the lengths of its open samples, in the order of `group.made`."""

    group: UnfinishedGroup
    truth: Sequence[int]


def held_back(
    groups: Sequence[Sequence[int]], slots: int, finished: float, cap: int, prompts: Sequence[str] = ()
) -> Iterator[HeldBack]:
    """The open groups once so large a share of the samples has ended. Samples start in order, a group after another."""
    lengths = [length for group in groups for length in group]
    starts = _starts(lengths, slots)
    ends = sorted(start + length for start, length in zip(starts, lengths, strict=True))
    count = round(finished * len(ends))
    now = ends[count - 1] if count else 0
    place = 0
    for at, group in enumerate(groups):
        began = starts[place : place + len(group)]
        place += len(group)
        whole = [length for start, length in zip(began, group, strict=True) if start + length <= now]
        left = [
            (max(0, now - start), length) for start, length in zip(began, group, strict=True) if start + length > now
        ]
        if left:
            known = UnfinishedGroup(
                finished=[one for one in whole if one < cap],
                stopped=[one for one in whole if one >= cap],
                made=[made for made, _ in left],
                prompt=prompts[at] if prompts else "",
                cap=cap,
            )
            yield HeldBack(known, [length for _, length in left])


def _starts(lengths: Sequence[int], slots: int) -> list[int]:
    free = [0] * min(slots, len(lengths))
    heapify(free)
    starts = list[int]()
    for length in lengths:
        starts.append(free[0])
        heapreplace(free, free[0] + length)
    return starts
