"""How fast each worker generates, learnt online: tokens/s against concurrency, corrected for the length of contexts.

After RLBoost (arXiv 2510.19225, section on load balancing), whose table of throughput against batch size is recorded
in one step, rescaled by the mean context and used in the next, the same for all engines. This one is per worker, so
that engines may differ; it is learnt while it is used; and how contexts slow an engine down is learnt too.

Invariant: `_bins` holds, per range of concurrency seen (`_keys`, rising), the mean seconds per token and the mean
context that went with them, older ones fading. Lost with the process; a second of each concurrency teaches it again.
"""

from bisect import bisect_left
from math import log2
from typing import Final

from msgspec import Struct

#: Ranges of concurrency: four to a doubling, single counts below.
_PER_DOUBLING: Final = 4.0
#: What was seen counts for at most so many seconds against what is seen now.
_MEMORY_S: Final = 60.0
#: Throughput within this of the highest is on the plateau; and it must have been seen so far beyond the knee.
_FLAT: Final = 0.93
_BEYOND: Final = 1.25
#: Contexts must differ by so many tokens to teach anything about what they cost, and explain at most and at least this
#: much a token.
_CONTEXT_TOKENS: Final = 256.0
_STEEPEST: Final = 1.0 / 1024
_GENTLEST: Final = 1e-6
#: What is beyond these says nothing of an engine: so no sum, product or quotient of what is kept leaves the numbers.
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
    """One worker's. `weigh_context` off leaves contexts out of it (for comparisons)."""

    def __init__(self, *, weigh_context: bool = True) -> None:
        self._weigh = weigh_context
        self._bins: list[_Bin] = []
        self._keys: list[int] = []
        self._covariance = self._variance = 0.0  # of relative slowdown and context
        self._slope = 0.0
        self._known: dict[float, float] = {}  # rates asked for since the last observation, while contexts cost nothing

    def observe(self, running: float, context: float, tokens: int, seconds: float) -> None:
        """In `seconds` the worker made `tokens` with `running` rollouts whose contexts were `context` long on average.

        Leave out spans in which it was held, installed weights, or began or ended many rollouts. Spans of less than a
        millisecond teach nothing; what no engine does is taken for the nearest that one might.
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
        """Tokens/s that each of `running` rollouts makes; 0.0 while nothing is known.

        Between what was seen it is interpolated; with fewer rollouts than were ever seen each is as fast as with
        those, and with more they share what the most made: so that it promises nothing that was not seen.
        """
        if not self._bins or running <= 0:
            return 0.0
        if self._slope:
            return self._rate(running, _believable(context))
        if running not in self._known:
            self._known[running] = self._rate(running, context)
        return self._known[running]

    def plateau(self, context: float) -> int:
        """The fewest rollouts with nearly the highest throughput, if it was seen not to grow beyond; else 0."""
        context = _believable(context)
        made = [(one.running, one.running / self._spent(one, context)) for one in self._bins]
        best = max((total for _, total in made), default=0.0)
        for before, (running, total) in zip([None, *made], made, strict=False):
            if total < _FLAT * best:
                continue
            knee = running
            if before is not None:  # between the two, where the line through them reaches the plateau
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
        if self._weigh and abs(further) >= _CONTEXT_TOKENS:
            fade = 1.0 - min(0.5, seconds / (10 * _MEMORY_S))
            self._covariance = fade * self._covariance + seconds * further * slowdown
            self._variance = fade * self._variance + seconds * further * further
            slope = min(_STEEPEST, self._covariance / self._variance)
            self._slope = slope if slope >= _GENTLEST else 0.0


def _believable(context: float) -> float:
    return min(_MOST, max(0.0, context))


def _key(running: float) -> int:
    return int(_PER_DOUBLING * log2(running) + 0.5)
