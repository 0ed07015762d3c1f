"""Predicts the speed of workers from others of their kind, at loads at which they were not seen themselves.

Workers are of one kind if their engines run one model on like devices. The time of a step is fitted to what all of
them were seen to take (`fitted_pace`). So a worker that has just come counts as fast as its kind. A worker that is
faster or slower than its kind at the loads seen of it is so at other loads, too.
"""

from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from ebbtide.scheduling.dispatch.throughput import WorkerThroughput
from ebbtide.scheduling.elastic.engine_pace import EnginePace, fitted_pace

#: Workers, evenly picked, that stand for a larger kind.
_SAMPLE: Final = 64


class KindPace(Struct, frozen=True):
    """The pace of a kind, between the `fewest` and the `most` rollouts at which it was seen."""

    pace: EnginePace
    fewest: float
    most: float

    def rate(self, running: float, context: float) -> float:
        """Tokens/s of each of `running` rollouts of a mean `context`.

        Below the fewest rollouts seen each is as fast as with those; above the most seen they share that throughput. So
        nothing is promised that no worker of the kind has shown.
        """
        seen = min(max(running, self.fewest), self.most)
        return min(1.0, seen / running) / self.pace.seconds(seen, context) if running > 0 else 0.0


def kind_pace(speeds: Sequence[WorkerThroughput]) -> KindPace | None:
    """The pace of workers of one kind; None while nothing was seen of any."""
    picked = speeds[:: -(-len(speeds) // _SAMPLE) or 1]
    points = [point for speed in picked for point in speed.points()]
    if not points:
        return None
    loads = [point.running for point in points]
    return KindPace(fitted_pace(points), min(loads), max(loads))


class PacedSpeed:
    """A worker's speed: as it was seen, and at other loads as its kind makes probable."""

    def __init__(self, own: WorkerThroughput | None, kind: KindPace | None) -> None:
        self._own, self._kind = own, kind

    def rate(self, running: float, context: float) -> float:
        """Tokens/s of each of `running` rollouts of a mean `context`; 0.0 while nothing is known of the kind either."""
        seen = self._own.rate(running, context) if self._own is not None else 0.0
        if self._own is None or not seen:
            return self._kind.rate(running, context) if self._kind is not None else 0.0
        fewest, most = self._own.span
        edge = min(max(running, fewest), most)
        if self._kind is None or edge == running or not edge:
            return seen
        at_edge = self._own.rate(edge, context)
        return at_edge * self._kind.rate(running, context) / self._kind.rate(edge, context)
