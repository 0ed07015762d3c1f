"""Learns how long a run's responses are, also from those that were stopped before their end.

The share of the responses that are longer than a length is the product-limit estimate (Kaplan and Meier, JASA 53, 1958,
section 2): a response that was stopped counts among those that go on, up to where it was stopped. One longer than all
is added to those observed, so that the next response has each rank with the same probability.

A length's score is the standard normal value that has the same share above it. Scores make any distribution normal,
whatever its tail. Beyond the observed lengths, their logarithms go on with scores along a straight line.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from math import exp, log
from statistics import NormalDist
from typing import Final

#: Knots of the curve from scores to lengths. Beyond four deviations no step has enough responses to tell.
_FIRST: Final = -4.0
_STEP: Final = 0.125
_KNOTS: Final = 65
#: The tail beyond the longest length takes its slope from so many deviations before it: less is noise.
_TAIL: Final = 1.0
#: Slopes of logarithms of lengths by scores. Equal lengths still need different scores, and a tail an end.
_SLOPES: Final = (1e-4, 3.0)
#: The longest length that anything is computed with.
_LONGEST: Final = 1e9
#: A score beyond this tells no more than that a length was never seen.
_FARTHEST: Final = 6.0
_NORMAL: Final = NormalDist()


class LengthMarginal:
    """A curve from scores to lengths in tokens. It rises strictly.

    `points`: scores that rise, with the logarithms of their lengths; at least one.
    """

    __slots__ = ("_logs",)

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        scores = [score for score, _ in points]
        below, above = _slope(points, scores, first=True), _slope(points, scores, first=False)
        logs = list[float]()
        for knot in range(_KNOTS):
            score = _FIRST + _STEP * knot
            found = _line(points, scores, score, below, above)
            logs.append(found if not logs else max(found, logs[-1] + _SLOPES[0] * _STEP))
        self._logs = logs

    def score(self, tokens: float) -> float:
        """The score of a length, at most 6 on either side."""
        wanted = log(min(max(1.0, tokens), _LONGEST))
        low = min(max(bisect_right(self._logs, wanted) - 1, 0), _KNOTS - 2)
        begin, end = self._logs[low], self._logs[low + 1]
        found = _FIRST + _STEP * (low + (wanted - begin) / (end - begin))
        return min(max(found, -_FARTHEST), _FARTHEST)

    def tokens(self, score: float) -> float:
        """The length of a score, in tokens."""
        place = (score - _FIRST) / _STEP
        low = min(max(int(place), 0), _KNOTS - 2)
        begin, end = self._logs[low], self._logs[low + 1]
        return exp(min(begin + (place - low) * (end - begin), log(_LONGEST)))


def log_normal(median: float, sigma: float) -> LengthMarginal:
    """The curve of a log-normal distribution: what stands for a run of which nothing is known."""
    return LengthMarginal([(-1.0, log(median) - sigma), (1.0, log(median) + sigma)])


def product_limit(ended: Iterable[float], stopped: Iterable[float] = ()) -> LengthMarginal | None:
    """Estimate the curve from lengths of responses that ended, and tokens made by those that were stopped. None if none
    ended.
    """
    events = sorted([*((max(1.0, one), False) for one in ended), *((max(1.0, one), True) for one in stopped)])
    at_risk, longer = len(events) + 1, 1.0
    points = list[tuple[float, float]]()
    for tokens, was_stopped in events:
        if not was_stopped:
            longer *= 1.0 - 1.0 / at_risk
            points.append((-_NORMAL.inv_cdf(longer), log(min(tokens, _LONGEST))))
        at_risk -= 1
    return LengthMarginal(points) if points else None


def _line(
    points: Sequence[tuple[float, float]], scores: Sequence[float], score: float, below: float, above: float
) -> float:
    """The logarithm at a score: between two points, or beyond them."""
    high = bisect_right(scores, score)
    if high == 0:
        return points[0][1] - below * (points[0][0] - score)
    if high == len(points):
        return points[-1][1] + above * (score - points[-1][0])
    (begin, low), (end, up) = points[high - 1], points[high]
    return low + (up - low) * (score - begin) / (end - begin)


def _slope(points: Sequence[tuple[float, float]], scores: Sequence[float], *, first: bool) -> float:
    """The slope beyond the first point, or beyond the last one."""
    if first:
        inner = points[min(bisect_right(scores, scores[0] + _TAIL), len(points) - 1)]
        outer = points[0]
    else:
        inner = points[max(bisect_right(scores, scores[-1] - _TAIL) - 1, 0)]
        outer = points[-1]
    apart = inner[0] - outer[0]
    if not apart:
        return 1.0  # a single length tells no slope
    return min(max((inner[1] - outer[1]) / apart, _SLOPES[0]), _SLOPES[1])
