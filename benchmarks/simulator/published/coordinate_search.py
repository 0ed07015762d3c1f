"""Fits what a paper does not state to its fitted points, by a coordinate search.

Each value in turn is tried a step above and below, within the range that is swept. Once no value gets better, steps are
halved. Judged points are never simulated here, so no setting can be chosen by them.
"""

from collections.abc import Callable, Mapping
from math import log
from typing import Final

from benchmarks.simulator.published.published_point import Paper, PointKind, PublishedPoint, Use

#: First steps, as shares of a value's range, and how often they are halved.
_FIRST, _HALVINGS = 0.25, 3
#: Deviations that count alike: a tenth of a value, five percentage points of a share, a factor of 1.5 of a count.
_VALUE, _SHARE, _COUNT = 0.10, 0.05, log(1.5)
#: A gain below this is none: the work's draws alone make as much of a difference.
_LEAST_GAIN: Final = 1e-3


def deviation(point: PublishedPoint, simulated: float) -> float:
    """How far a simulated value is from the published one, in units that count alike."""
    match point.kind:
        case PointKind.VALUE:
            return log(simulated / point.value) / _VALUE
        case PointKind.SHARE:
            return (simulated - point.value) / _SHARE
        case PointKind.COUNT:
            return log(max(simulated, 1.0) / point.value) / _COUNT


class CoordinateSearch:
    """`tell` hears of each gain."""

    def __init__(self, paper: Paper, tell: Callable[[str], None]) -> None:
        self._paper, self._tell = paper, tell
        self._points = [one for one in paper.points if one.use is Use.FITTED]
        self._keys = frozenset(one.key for one in self._points)

    def objective(self, unstated: Mapping[str, float]) -> float:
        """The mean square of the fitted points' deviations."""
        found = self._paper.simulated(unstated, self._keys)
        return sum(deviation(one, found[one.key]) ** 2 for one in self._points) / len(self._points)

    def run(self) -> dict[str, float]:
        """Return the best setting that was found from the paper's present one on."""
        best = {one.name: one.value for one in self._paper.unstated}
        least, share = self.objective(best), _FIRST
        self._tell(f"{least:.3f} from {best}")
        for _ in range(_HALVINGS + 1):
            gained = True
            while gained:
                gained = False
                for one in self._paper.unstated:
                    for step in (share, -share):
                        value = best[one.name] + step * (one.high - one.low)
                        if not one.low < value < one.high:
                            continue
                        tried = best | {one.name: float(f"{value:.4g}")}
                        found = self.objective(tried)
                        if found < least - _LEAST_GAIN:
                            best, least, gained = tried, found, True
                            self._tell(f"{least:.3f} with {one.name} = {tried[one.name]:g}")
                            break
            share /= 2
        return best
