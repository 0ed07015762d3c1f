"""Measures how fast workers generated, from the attempts that ended on them."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

from ebbtide.simulator.recording.recorded_run import MeasuredEngine
from ebbtide.simulator.report.seed_spread import quantile
from ebbtide.types.run import AttemptSpan

#: Shorter attempts say more of flushes than of the engine: a flush window is 32 tokens by default.
_LEAST_TOKENS: Final = 32


class AttemptPace(NamedTuple):
    """One attempt's seconds per token, while `running` attempts ran beside and with it on average."""

    seconds: float
    running: float
    tokens: int


class WorkerLoad:
    """How many attempts ran on a worker at each moment."""

    def __init__(self, spans: Iterable[AttemptSpan]) -> None:
        self._spans = [span for span in spans if span.end_s > span.begin_s]
        changes = sorted([(one.begin_s, 1) for one in self._spans] + [(one.end_s, -1) for one in self._spans])
        self._times = [at for at, _ in changes]
        self._counts = list(accumulate(by for _, by in changes))
        areas = (count * (after - at) for (at, after), count in zip(pairwise(self._times), self._counts, strict=False))
        self._areas = [0.0, *accumulate(areas)]

    @property
    def most(self) -> int:
        return max(self._counts, default=0)

    @property
    def generating_s(self) -> float:
        """Seconds in which at least one attempt ran."""
        steps = zip(pairwise(self._times), self._counts, strict=False)
        return sum(after - at for (at, after), count in steps if count)

    @property
    def rollout_s(self) -> float:
        return sum(one.end_s - one.begin_s for one in self._spans)

    def mean(self, begin_s: float, end_s: float) -> float:
        """How many ran on average between two moments."""
        return (self._area(end_s) - self._area(begin_s)) / (end_s - begin_s)

    def paces(self) -> list[AttemptPace]:
        """Of the attempts that made enough tokens."""
        found = []
        for span in self._spans:
            tokens, seconds = span.last - span.first, span.end_s - span.begin_s
            if tokens >= _LEAST_TOKENS:
                found.append(AttemptPace(seconds / tokens, self.mean(span.begin_s, span.end_s), tokens))
        return found

    def _area(self, at: float) -> float:
        index = bisect_right(self._times, at) - 1
        if index < 0:
            return 0.0
        return self._areas[index] + self._counts[index] * (at - self._times[index])


def measured_engine(loads: Mapping[str, WorkerLoad]) -> MeasuredEngine | None:
    """Fits one engine to the attempts of all workers."""
    paces = [pace for load in loads.values() for pace in load.paces()]
    if not paces:
        return None
    base_s, rollout_s = _line(paces)
    errors = [abs(base_s + rollout_s * pace.running - pace.seconds) / pace.seconds for pace in paces]
    return MeasuredEngine(
        base_s=base_s,
        rollout_s=rollout_s,
        attempts=len(paces),
        error_median=quantile(errors, 0.5) or 0.0,
        error_p90=quantile(errors, 0.9) or 0.0,
        error_worst=max(errors),
    )


def relative_speed(load: WorkerLoad, engine: MeasuredEngine | None) -> float:
    """How many times as fast as the fitted engine a worker was; 1 where nothing was measured."""
    paces = load.paces()
    if engine is None or not paces:
        return 1.0
    expected = sum(pace.tokens * (engine.base_s + engine.rollout_s * pace.running) for pace in paces)
    return expected / sum(pace.tokens * pace.seconds for pace in paces)


def _line(paces: Sequence[AttemptPace]) -> tuple[float, float]:
    """Least squares of `base + slope * running`, weighted by tokens, with neither below 0."""
    weight = sum(pace.tokens for pace in paces)
    x = sum(pace.tokens * pace.running for pace in paces) / weight
    y = sum(pace.tokens * pace.seconds for pace in paces) / weight
    spread = sum(pace.tokens * (pace.running - x) ** 2 for pace in paces)
    both = sum(pace.tokens * (pace.running - x) * (pace.seconds - y) for pace in paces)
    slope = both / spread if spread > 0 else 0.0
    base = y - slope * x
    if slope < 0:
        return y, 0.0
    if base < 0:
        squares = sum(pace.tokens * pace.running**2 for pace in paces)
        return 0.0, sum(pace.tokens * pace.running * pace.seconds for pace in paces) / squares
    return base, slope
