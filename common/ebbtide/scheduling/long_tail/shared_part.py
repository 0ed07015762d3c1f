"""Infers what the samples of a prompt have in common, from those that ended and from those that did not.

Scores of lengths (`length_marginal`) are taken as standard normal, with a part that the samples of a group share: a
Gaussian copula. A sample that ended tells its score. One that runs, waits or was stopped tells that its score is beyond
what it made. So the shared part is the mean of a censored normal sample, and its distribution is far from normal while
most samples run: it is computed on a grid.

A sample may have nothing in common with its group, as those that fall into a loop. That is `_STRAY`'s probability, and
keeps one such sample from deciding for its siblings.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import erfc, exp, log, pi, sqrt
from operator import mul
from statistics import NormalDist
from typing import Final, NamedTuple

#: One response in a hundred is independent of its group. An assumption.
_STRAY: Final = 0.01
#: Points of the grid. A trapezoidal sum over a bell is exact to 1e-4 with a point in 1.4 deviations, and the widest
#: grid is twenty deviations long.
_POINTS: Final = 28
#: The grid's ends: deviations below the mean without the open samples, which only make it greater, and above the mode.
_BELOW, _BEYOND = 3.5, 5.0
#: Newton's steps to the mode: logarithms of survival are concave, and steps from below never overshoot.
_NEWTON: Final = 6
#: Beyond so many deviations a normal's tail is taken as no thinner.
_FARTHEST: Final = 30.0
_ROOT_HALF: Final = sqrt(0.5)
#: Beyond so many deviations a normal's tail is taken by its asymptote.
_ASYMPTOTIC: Final = 6.0
_NORMAL: Final = NormalDist()
#: Points of so little weight are left out of a sample's distribution.
_NEGLIGIBLE: Final = 1e-5
#: A sample is not expected further than so many deviations from what is likely: one in sixteen thousand is.
_REACH: Final = 4.0
#: From this probability on, what a stray sample may make counts.
_ASTRAY: Final = 0.005
#: They find a quantile within 1e-4 of a deviation.
_HALVINGS: Final = 17


class SharedPrior(NamedTuple):
    """What is known of a group's shared part before any of its samples."""

    mean: float
    variance: float


class SharedPart(NamedTuple):
    """The shared part's distribution: weights of a grid's points; they sum up to 1. `log_evidence`: the logarithm of
    the probability of the open samples, given those that ended.
    """

    points: Sequence[float]
    weights: Sequence[float]
    log_evidence: float

    @property
    def moments(self) -> tuple[float, float]:
        """Mean and variance."""
        mean = sum(map(mul, self.points, self.weights))
        return mean, sum(weight * (point - mean) ** 2 for point, weight in zip(self.points, self.weights, strict=True))


def shared_part(prior: SharedPrior, within: float, ended: Sequence[float], open_: Sequence[float]) -> SharedPart:
    """Infer the shared part. `within`: the deviation of samples around it; `ended`: scores of lengths; `open_`: scores
    of what the others made.
    """
    precision = 1.0 / prior.variance + len(ended) / (within * within)
    mean = (prior.mean / prior.variance + sum(ended) / (within * within)) / precision
    deviation = sqrt(1.0 / precision)
    alike = Counter(open_)  # samples that began together have often made the same
    mode, narrow = _mode(mean, deviation, within, alike)
    first, last = mean - _BELOW * deviation, mode + _BEYOND * narrow
    step = (last - first) / (_POINTS - 1)
    points = [first + step * index for index in range(_POINTS)]
    likely = [-0.5 * ((point - mean) / deviation) ** 2 for point in points]
    for score, count in alike.items():
        stray = _STRAY * longer(score)
        likely = [
            so_far + count * log((1.0 - _STRAY) * longer((score - point) / within) + stray)
            for so_far, point in zip(likely, points, strict=True)
        ]
    greatest = max(likely)
    weights = [exp(one - greatest) for one in likely]
    total = sum(weights)
    evidence = greatest + log(total * step / (deviation * sqrt(2.0 * pi)))
    return SharedPart(points, [one / total for one in weights], evidence)


def longer(score: float) -> float:
    """The probability that a standard normal value is beyond `score`; never 0."""
    return 0.5 * erfc(min(score, _FARTHEST) * _ROOT_HALF)


def quantile_beyond(score: float, share: float) -> float:
    """The standard normal value that one beyond `score` does not exceed with probability `share` (0 and 1 excluded)."""
    if score > _ASYMPTOTIC:
        return score - log(1.0 - share) / score
    return -_NORMAL.inv_cdf(max(longer(score) * (1.0 - share), 1e-15))


class SampleTail:
    """How far a sample goes beyond `made`, a score that is one of those that `part` was inferred from."""

    __slots__ = ("_aside", "_made", "_points", "_within", "bottom", "top")

    def __init__(self, part: SharedPart, within: float, made: float) -> None:
        stray = _STRAY * longer(made)
        shares = [
            weight / ((1.0 - _STRAY) * longer((made - point) / within) + stray)
            for point, weight in zip(part.points, part.weights, strict=True)
        ]
        total = sum(shares)
        self._made, self._within, self._aside = made, within, _STRAY * total
        self._points = [
            (point, (1.0 - _STRAY) * share)
            for point, share, weight in zip(part.points, shares, part.weights, strict=True)
            if share > _NEGLIGIBLE * total or weight > _NEGLIGIBLE
        ]
        kept = sum(share for _, share in self._points)
        mean = sum(point * share for point, share in self._points) / kept
        variance = sum(share * (point - mean) ** 2 for point, share in self._points) / kept
        reach = _REACH * sqrt(variance + within * within)
        #: A score that the sample hardly stays below, if it made nothing, and one that it hardly exceeds.
        self.bottom, self.top = mean - reach, max(mean + reach, made + _REACH * within)
        if self._aside * longer(made) > _ASTRAY:
            self.top = max(self.top, _REACH)

    def beyond(self, score: float) -> float:
        """The probability that the sample goes beyond a score."""
        if score <= self._made:
            return 1.0
        within = self._within
        shared = sum([share * longer((score - point) / within) for point, share in self._points])
        return min(1.0, shared + self._aside * longer(score))

    def quantile(self, share: float) -> float:
        """The score that the sample does not exceed with probability `share`, strictly between 0 and 1."""
        low, high, wanted = self._made, self.top, 1.0 - share
        for _ in range(_HALVINGS):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if self.beyond(middle) > wanted else (low, middle)
        return 0.5 * (low + high)


def _mode(mean: float, deviation: float, within: float, open_: Mapping[float, int]) -> tuple[float, float]:
    """The most likely shared part, and the deviation of the bell around it. `open_`: how many have each score."""
    at, precision = mean, 1.0 / (deviation * deviation)
    curvature = precision
    for _ in range(_NEWTON if open_ else 0):
        force, curvature = precision * (mean - at), precision
        for score, count in open_.items():
            far = (score - at) / within
            hazard = _hazard(far)
            force += count * hazard / within
            curvature += count * hazard * (hazard - far) / (within * within)
        at += force / curvature
    return at, sqrt(1.0 / curvature)


def _hazard(far: float) -> float:
    """Density over survival of a standard normal."""
    if far > _ASYMPTOTIC:
        return far + 1.0 / far
    return exp(-0.5 * far * far) / (0.5 * erfc(far * _ROOT_HALF) * sqrt(2.0 * pi))
