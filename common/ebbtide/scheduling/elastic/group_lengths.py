"""Predicts how long the responses of a group that is under way will be, from whole groups of former steps.

Samples of one prompt are alike. So a group's length is drawn first: the mean of its finished samples if there are any,
else a quantile of former groups' means that its longest sample allows. Each sample has a quantile of the ratio of
samples to their group's mean upon that, given what it has made. The quantiles are evenly spread over groups and
samples, so a forecast has the spread of real steps, and needs no chance.

Only whole steps teach: of a step under way the short responses are known first.

Invariant: `_means` and `_ratios` are sorted, and have the groups of the newest steps. Lost with the process; one step
teaches them again.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Final

from msgspec import Struct

#: Groups that are remembered: two steps or more of usual sizes.
_MEMORY: Final = 512
#: A response that is longer than all that are known goes on for this share of itself, and at least so many tokens.
_BEYOND: Final = 0.25
_LEAST_TOKENS: Final = 64.0
#: Until a step has ended, a response is expected to have as many tokens to come as it has, and at least so many.
_UNKNOWN_TOKENS: Final = 1_024.0
#: The golden ratio's fraction: its multiples are spread evenly over the unit interval, however many there are.
_GOLDEN: Final = 0.618_033_988_749_895


class GroupLeft(Struct, frozen=True, kw_only=True, gc=False):
    """A group of which not all samples have ended. Lengths in tokens."""

    prompt: int
    finished: Sequence[int] = ()  # whole responses
    running: Sequence[int] = ()  # made so far, by rollouts that an engine runs
    waiting: Sequence[int] = ()  # made so far, by rollouts that none runs
    cap: int = 1 << 20  # the longest response


class GroupLengths:
    def __init__(self) -> None:
        self._groups: deque[tuple[float, Sequence[float]]] = deque(maxlen=_MEMORY)
        self._means: list[float] = []
        self._ratios: list[float] = []

    def step_ended(self, groups: Iterable[Sequence[int]]) -> None:
        """Learn from the responses of a step's groups."""
        for lengths in groups:
            if lengths and (mean := fmean(lengths)) > 0:
                self._groups.append((mean, [length / mean for length in lengths]))
        self._means = sorted(mean for mean, _ in self._groups)
        self._ratios = sorted(ratio for _, ratios in self._groups for ratio in ratios)

    @property
    def known(self) -> bool:
        """Whether a step has taught anything."""
        return bool(self._means)

    def rests(self, group: GroupLeft, place: int) -> list[float]:
        """Tokens still to come of the running samples, then of the waiting ones. `place`: of the group among those
        that are asked about, counted from 0.
        """
        made = [*group.running, *group.waiting]
        if not self._means:
            return [min(max(_UNKNOWN_TOKENS, float(one)), max(1.0, group.cap - one)) for one in made]
        mean = fmean(group.finished) if group.finished else self._mean(max(made, default=0), _share(place))
        rests = []
        for index, one in enumerate(made):
            ratio = _above(self._ratios, one / mean, _share(place + index))
            rest = ratio * mean - one if ratio is not None else max(_LEAST_TOKENS, _BEYOND * one)
            rests.append(min(max(1.0, rest), max(1.0, float(group.cap - one))))
        return rests

    def _mean(self, longest: int, share: float) -> float:
        """A group's mean length if one of its samples has made so much already."""
        typical = self._ratios[-1]
        found = _above(self._means, longest / typical, share)
        return found if found is not None else longest / typical + _LEAST_TOKENS


def _share(place: int) -> float:
    return (0.5 + place * _GOLDEN) % 1.0


def _above(values: Sequence[float], least: float, share: float) -> float | None:
    """The value at a share of those above `least`; None if there is none."""
    first = bisect_right(values, least)
    if first == len(values):
        return None
    return values[first + int(share * (len(values) - first))]
