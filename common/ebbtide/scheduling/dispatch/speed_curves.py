"""Says how fast each engine decodes at any load, from what was seen of all of them.

How load slows an engine down is learnt from all engines of one kind together, since one of them is seen at few loads:
the median over those that were seen at a load. How much faster or slower an engine is than its kind is one factor, over
all that was seen of it; a factor near one is noise, so like engines count as alike, and load alone decides among them.
Little is promised that was not seen: below the fewest rollouts seen each is taken for somewhat faster than with those,
or an empty engine would never be tried; above the most they share that throughput.
"""

from bisect import bisect_left
from collections.abc import Sequence
from math import log, nan, sqrt
from statistics import fmean, median
from typing import Final, NamedTuple

import numpy as np

from ebbtide.scheduling.dispatch.throughput import WorkerThroughput

#: A factor this near to one, as a logarithm, does not tell an engine from others of its kind.
_ALIKE: Final = 0.1
#: A factor beyond this is not believed: the worker was held up while it was observed.
_INCREDIBLE: Final = 100.0
#: A load counts as seen up to so much beyond what was seen.
_NEAR: Final = 1.1
#: Loads between which curves are interpolated: four to a doubling, up to some 16,000.
LOADS: Final = tuple(sorted({round(2.0 ** (step / 4)) for step in range(57)}))
#: The least share of the shortest time seen that a token is taken to need with fewer rollouts.
_UNSEEN: Final = 0.67
#: Times that curve and factors are fitted in turn.
_PASSES: Final = 12
_CLOSE: Final = 0.005
#: The least that a shorter context leaves of a token's time.
_LEAST: Final = 0.25
#: Engines, evenly picked, that stand for a larger kind.
_SAMPLE: Final = 64


class SeenEngine(NamedTuple):
    """What was learnt of an engine. `context`: mean tokens of its rollouts now; None: it has none, and counts as a
    usual one: what comes brings its context along.
    """

    speed: WorkerThroughput | None
    context: float | None


class SpeedCurve(NamedTuple):
    """Seconds that one token of each rollout takes, at each of the rising `loads`."""

    loads: Sequence[float]
    seconds: Sequence[float]

    def token_s(self, running: float) -> float:
        loads, seconds = self.loads, self.seconds
        if running >= loads[-1]:
            return seconds[-1] * running / loads[-1]
        at = bisect_left(loads, running)
        if at == 0:
            return seconds[0] * max(_UNSEEN, sqrt(sqrt(running / loads[0])))
        share = (running - loads[at - 1]) / (loads[at] - loads[at - 1])
        return seconds[at - 1] + share * (seconds[at] - seconds[at - 1])

    def rate(self, running: float, context: float = 0.0) -> float:  # noqa: ARG002 - the curve is that of its context
        """Tokens/s of each of `running` rollouts."""
        return 1.0 / self.token_s(running) if running > 0 else 0.0

    def scaled(self, factor: float) -> "SpeedCurve":
        return self if factor == 1.0 else SpeedCurve(self.loads, [factor * one for one in self.seconds])


class KindCurve:
    """How fast engines of one kind are at each load, at the mean context of all of them."""

    def __init__(self, curve: SpeedCurve, context: float, slope: float) -> None:
        """`slope`: how much longer a token takes for each token of context more, as a share."""
        self._curve, self._context, self._slope = curve, context, slope

    @classmethod
    def learnt(cls, engines: Sequence[SeenEngine]) -> "KindCurve | None":
        """From what was seen of these engines; None if nothing was."""
        seen = [one.speed for one in engines if one.speed is not None and one.speed.span[1] > 0.0]
        seen = seen[:: -(-len(seen) // _SAMPLE) or 1]
        if not seen:
            return None
        contexts = [one.context for one in engines if one.context is not None]
        context, slope = fmean(contexts or [0.0]), median(one.slope for one in seen)
        first = cls(_kind_curve(seen, context), context, slope)
        believed = [one for one in seen if 1.0 / _INCREDIBLE < first._slowness(one) < _INCREDIBLE]
        return first if len(believed) in {0, len(seen)} else cls(_kind_curve(believed, context), context, slope)

    def of(self, engine: SeenEngine) -> SpeedCurve:
        """The curve of one engine, at its own mean context."""
        factor = self._slowness(engine.speed) if engine.speed is not None else 1.0
        if abs(log(factor)) < _ALIKE or not 1.0 / _INCREDIBLE < factor < _INCREDIBLE:
            factor = 1.0
        further = engine.context - self._context if engine.context is not None else 0.0
        return self._curve.scaled(factor * max(_LEAST, 1.0 + self._slope * further))

    def _slowness(self, speed: WorkerThroughput) -> float:
        """How many times as long as its kind an engine takes for a token, over all that was seen of it."""
        points = speed.points()
        seen_s = sum(point.seen_s for point in points)
        if seen_s <= 0.0:
            return 1.0
        took = 0.0
        for point in points:
            took += point.seen_s / (speed.rate(point.running, self._context) * self._curve.token_s(point.running))
        return took / seen_s


def _kind_curve(seen: Sequence[WorkerThroughput], context: float) -> SpeedCurve:
    """The median over the engines that were seen at a load. Not all were seen at each, so each counts as if it were as
    fast as its kind: by a factor of its own, fitted in turn with the curve. No load is taken to be faster than a
    smaller one.
    """
    spans = [speed.span for speed in seen]
    fewest, most = min(low for low, _ in spans), max(high for _, high in spans)
    loads = [fewest, *(one for one in LOADS if fewest < one < most), *([most] if most > fewest else [])]
    taken = np.array(
        [
            [-log(speed.rate(load, context)) if low <= load * _NEAR and load <= high * _NEAR else nan for load in loads]
            for speed, (low, high) in zip(seen, spans, strict=True)
        ]
    )
    at = ~np.isnan(taken).all(axis=0)
    taken = taken[:, at]
    usual = np.nanpercentile(taken, 25, axis=0, method="lower")  # many may have been held up, few are too fast
    taken[np.abs(taken - usual) > log(_INCREDIBLE)] = nan
    factors = np.zeros((len(seen), 1))
    for _ in range(_PASSES if len(seen) > 1 else 1):
        curve = np.nanmedian(taken - factors, axis=0)
        off = taken - curve
        seen_at = np.maximum(1, (~np.isnan(off)).sum(axis=1, keepdims=True))
        before, factors = factors, np.nansum(off, axis=1, keepdims=True) / seen_at
        factors -= np.median(factors)
        if np.abs(factors - before).max() < _CLOSE:
            break
    seconds = np.maximum.accumulate(np.exp(curve))
    return SpeedCurve([load for load, was in zip(loads, at, strict=True) if was], seconds.tolist())
