"""Predicts how long the responses of a group that is under way will be, from whole groups of former steps.

Samples of one prompt are alike: a length's logarithm is taken as normal, with a part that a group shares. Of a group
under way the short samples are known first, so the mean of those that ended would be too low. Here those that run count
too, as longer than what they have made: the shared part is the mean of a censored normal sample with former groups as
the prior. Its distribution is far from normal while most samples run, so it is computed on a grid.

A forecast needs the spread of real steps, not only means. So each group and each sample takes a quantile of what is
likely of it. The quantiles are evenly spread over groups and samples; nothing is drawn at random.

Only whole steps teach: of a step under way the short responses are known first.

Invariant: `_groups` has the logarithms of the newest steps' lengths, and the other fields follow from them. Lost with
the process; one step teaches them again.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from math import erfc, exp, log, sqrt
from statistics import NormalDist, fmean
from typing import Final

from msgspec import Struct

#: Groups that are remembered: two steps or more of usual sizes.
_MEMORY: Final = 512
#: Until a step has ended, a response is expected to have as many tokens to come as it has, and at least so many.
_UNKNOWN_TOKENS: Final = 1_024.0
#: Points of the shared part, in deviations of what is expected without the open samples. Those make it longer only.
_GRID: Final = tuple(-2.5 + 0.25 * point for point in range(35))
#: Lengths of equal samples still spread a little: less cannot be told from noise.
_LEAST_SPREAD: Final = 0.02
#: Beyond so many deviations the normal's tail is taken by its asymptote.
_FAR: Final = 6.0
#: The golden ratio's fraction: its multiples are spread evenly over the unit interval, however many there are.
_GOLDEN: Final = 0.618_033_988_749_895
#: Spreads the samples of a group in another order than the groups.
_SILVER: Final = 0.414_213_562_373_095
_NORMAL: Final = NormalDist()


class GroupLeft(Struct, frozen=True, kw_only=True, gc=False):
    """A group of which not all samples have ended. Lengths in tokens."""

    prompt: int
    finished: Sequence[int] = ()  # whole responses
    running: Sequence[int] = ()  # made so far, by rollouts that an engine runs; those on lent devices first
    lent: int | None = None  # of `running`, so many are on lent devices; None: that is not known
    waiting: Sequence[int] = ()  # made so far, by rollouts that none runs
    cap: int = 1 << 20  # the longest response


class GroupLengths:
    def __init__(self) -> None:
        self._groups: deque[Sequence[float]] = deque(maxlen=_MEMORY)
        self._mean = 0.0  # of groups' shared parts
        self._between = self._within = _LEAST_SPREAD  # deviations of groups, and of samples within a group

    def step_ended(self, groups: Iterable[Sequence[int]]) -> None:
        """Learn from the responses of a step's groups."""
        self._groups.extend([log(max(1, length)) for length in lengths] for lengths in groups if lengths)
        if not self._groups:
            return
        means = [fmean(logs) for logs in self._groups]
        self._mean = fmean(means)
        free = sum(len(logs) - 1 for logs in self._groups)
        apart = sum((one - mean) ** 2 for logs, mean in zip(self._groups, means, strict=True) for one in logs)
        within = apart / free if free else 0.0
        size = fmean(len(logs) for logs in self._groups)
        between = fmean((mean - self._mean) ** 2 for mean in means) - within / size
        self._within = max(_LEAST_SPREAD, sqrt(within))
        self._between = max(_LEAST_SPREAD, sqrt(max(0.0, between)))

    @property
    def known(self) -> bool:
        """Whether a step has taught anything."""
        return bool(self._groups)

    def rests(self, group: GroupLeft, place: int) -> list[float]:
        """Tokens still to come of the running samples, then of the waiting ones. `place`: of the group among those
        that are asked about, counted from 0.
        """
        made = [*group.running, *group.waiting]
        if not self._groups:
            return [min(max(_UNKNOWN_TOKENS, float(one)), max(1.0, group.cap - one)) for one in made]
        shared = self._shared(group, made, _share(place, _GOLDEN))
        rests = []
        for index, one in enumerate(made):
            least = _above((log(max(1, one)) - shared) / self._within, _share(place + index, _SILVER))
            rest = exp(min(shared + self._within * least, 30.0)) - one
            rests.append(min(max(1.0, rest), max(1.0, float(group.cap - one))))
        return rests

    def _shared(self, group: GroupLeft, made: Sequence[int], share: float) -> float:
        """The group's part of its lengths' logarithms, as the quantile `share` of what is likely of it."""
        within = self._within
        ended = [log(max(1, one)) for one in group.finished if one < group.cap]
        open_ = [log(max(1, one)) for one in (*made, *(one for one in group.finished if one >= group.cap))]
        weight = (within / self._between) ** 2  # the prior weighs as so many samples
        mean = (sum(ended) + weight * self._mean) / (len(ended) + weight)
        deviation = within / sqrt(len(ended) + weight)
        least = fmean(open_) if open_ else 0.0  # open samples of a group have made nearly the same
        likely, total = [], 0.0
        for at in _GRID:
            shared = mean + deviation * at
            longer = 0.5 * erfc((least - shared) / (within * sqrt(2.0)))
            total += exp(-0.5 * at * at) * longer ** len(open_)
            likely.append((total, shared))
        if total <= 0.0:
            return least + within
        return next(shared for until, shared in likely if until >= share * total)


def _share(place: int, step: float) -> float:
    """A share strictly between 0 and 1."""
    return min(max((0.5 + place * step) % 1.0, 0.005), 0.995)


def _above(least: float, share: float) -> float:
    """The quantile of a standard normal at a share of what lies above `least`."""
    if least > _FAR:
        return least - log(1.0 - share) / least
    tail = 0.5 * erfc(least / sqrt(2.0)) * (1.0 - share)
    return -_NORMAL.inv_cdf(max(tail, 1e-15))
