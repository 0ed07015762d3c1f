"""Learns how fast a worker generates: tokens/s against concurrency, corrected for the length of contexts.

RLBoost (arXiv 2510.19225, section on load balancing) records a table of throughput against batch size in one step,
rescales it by the mean context and uses it in the next, for all engines alike. This table is per worker, so that
engines may differ; it is learnt while it is used, and so is the slowdown by contexts.

Invariant: `_bins` holds, per range of concurrency seen (`_keys`, rising), the mean seconds per token and the mean
context, older observations fading. Lost with the process; a second at each concurrency teaches it again.
"""

from bisect import bisect_left
from math import log2
from typing import Final

from msgspec import Struct

from ebbtide.coordinator.forecasts.engine_pace import ThroughputPoint

#: Ranges of concurrency: four to a doubling, single counts below.
_PER_DOUBLING: Final = 4.0
#: Past observations weigh at most so many seconds.
_MEMORY_S: Final = 60.0
#: The plateau begins at this share of the highest throughput, and must have been seen so far beyond its knee.
_FLAT: Final = 0.93
_BEYOND: Final = 1.25
#: Contexts must differ by so many tokens to teach their cost; bounds of the slowdown per token.
_CONTEXT_TOKENS: Final = 256.0
_STEEPEST: Final = 1.0 / 1024
_GENTLEST: Final = 1e-6
#: Observations are clamped to these, so that no calculation overflows.
_SHORTEST_S: Final = 1e-3
_LONGEST_S: Final = 1e6
_LEAST_SPENT_S: Final = 1e-9
_MOST: Final = 1e9


class _Bin(Struct):
    running: float
    seconds_per_token: float
    context: float
    weight_s: float


class WorkerThroughput:
    """One worker's speed."""

    def __init__(self) -> None:
        self._bins: list[_Bin] = []
        self._keys: list[int] = []
        self._covariance = self._variance = 0.0  # of relative slowdown and context
        self._slope = 0.0
        self._known: dict[float, float] = {}  # rates since the last observation, cached while contexts cost nothing

    def observe(self, running: float, context: float, tokens: int, seconds: float) -> None:
        """Learn that the worker made `tokens` in `seconds` with `running` rollouts of a mean `context`.

        Leave out spans in which it was held, installed weights, or began or ended many rollouts. Spans of less than a
        millisecond are ignored, and impossible values clamped.
        """
        if not 1 <= running <= _MOST or tokens <= 0 or seconds < _SHORTEST_S:
            return
        self._known.clear()
        seconds, context = min(seconds, _LONGEST_S), _believable(context)
        spent = min(_LONGEST_S, max(_LEAST_SPENT_S, running * seconds / min(tokens, 1 << 53)))
        key = _key(running)
        at = bisect_left(self._keys, key)
        if at == len(self._keys) or self._keys[at] != key:
            self._keys.insert(at, key)
            self._bins.insert(at, _Bin(running, spent, context, seconds))
            return
        known = self._bins[at]
        self._learn_slope(spent / known.seconds_per_token - 1.0, context - known.context, seconds)
        known.weight_s = min(_MEMORY_S, known.weight_s + seconds)
        share = min(1.0, seconds / known.weight_s)
        known.running += share * (running - known.running)
        known.seconds_per_token += share * (spent - known.seconds_per_token)
        known.context += share * (context - known.context)

    def rate(self, running: float, context: float) -> float:
        """Tokens/s of each of `running` rollouts; 0.0 while nothing is known.

        Interpolated between observations. Below the fewest rollouts seen, each is as fast as with those; above the most
        seen, they share that throughput. So nothing is promised that was not seen.
        """
        if not self._bins or running <= 0:
            return 0.0
        if self._slope:
            return self._rate(running, _believable(context))
        if running not in self._known:
            self._known[running] = self._rate(running, context)
        return self._known[running]

    @property
    def span(self) -> tuple[float, float]:
        """The fewest and the most rollouts at which it was seen; zeros while nothing is known."""
        return (self._bins[0].running, self._bins[-1].running) if self._bins else (0.0, 0.0)

    @property
    def slope(self) -> float:
        """How much longer a token takes for each token of context more, as a share; 0.0 while that is not known."""
        return self._slope

    def points(self) -> list[ThroughputPoint]:
        """What was seen, at each range of concurrency."""
        return [ThroughputPoint(one.running, one.seconds_per_token, one.context, one.weight_s) for one in self._bins]

    def plateau(self, context: float) -> int:
        """The fewest rollouts with nearly the highest throughput, if it was seen not to grow further; else 0."""
        context = _believable(context)
        made = [(one.running, one.running / self._spent(one, context)) for one in self._bins]
        best = max((total for _, total in made), default=0.0)
        for before, (running, total) in zip([None, *made], made, strict=False):
            if total < _FLAT * best:
                continue
            knee = running
            if before is not None:  # interpolated to where the plateau begins
                knee = before[0] + (running - before[0]) * (_FLAT * best - before[1]) / (total - before[1])
            return max(1, round(knee)) if made[-1][0] >= _BEYOND * knee else 0
        return 0

    def _rate(self, running: float, context: float) -> float:
        at = bisect_left(self._keys, _key(running))
        low = self._bins[at - 1 if at else 0]
        high = self._bins[at] if at < len(self._bins) else self._bins[-1]
        fast, slow = self._spent(low, context), self._spent(high, context)
        if running >= high.running:
            return high.running / (slow * running)
        if running <= low.running or high.running == low.running:
            return 1.0 / fast
        share = (running - low.running) / (high.running - low.running)
        return 1.0 / (fast + share * (slow - fast))

    def _spent(self, one: _Bin, context: float) -> float:
        """Seconds per token of a bin, with contexts of another length."""
        if not self._slope:
            return one.seconds_per_token
        return one.seconds_per_token * max(0.25, 1.0 + self._slope * (context - one.context))

    def _learn_slope(self, slowdown: float, further: float, seconds: float) -> None:
        if abs(further) >= _CONTEXT_TOKENS:
            fade = 1.0 - min(0.5, seconds / (10 * _MEMORY_S))
            self._covariance = fade * self._covariance + seconds * further * slowdown
            self._variance = fade * self._variance + seconds * further * further
            slope = min(_STEEPEST, self._covariance / self._variance)
            self._slope = slope if slope >= _GENTLEST else 0.0


def _believable(context: float) -> float:
    return min(_MOST, max(0.0, context))


def _key(running: float) -> int:
    return int(_PER_DOUBLING * log2(running) + 0.5)
