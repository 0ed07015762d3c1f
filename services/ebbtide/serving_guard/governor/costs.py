"""Learns online what serving and rollout steps cost by their size: steps, prefills and decodes.

Each cost is a line through recent observations, and a margin above it. The line is a least-squares fit in which older
observations weigh less. The margin is a quantile of how far the last observations were above the line, as in conformal
prediction, so no assumption about their distribution is needed.

Invariant: a prediction never falls with size. If only one size was seen, larger sizes cost in proportion, and smaller
sizes cost the same.
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from math import ceil, inf
from typing import Final

#: With fewer observations a quantile is uncertain: predictions are multiplied by `_UNSURE`.
ENOUGH: Final = 8
_UNSURE: Final = 2.0
#: If sizes differ by less than this part of their mean, they show no slope.
_APART: Final = 0.05
#: A cost counts for at most this multiple of the line, so that an outlier does not bend it, nor the mean of steps.
_OUTLIER: Final = 4.0
_LEAST_S: Final = 1e-6


class RecentValues:
    """The last `size` values, and their quantiles."""

    def __init__(self, size: int) -> None:
        self._order: deque[float] = deque(maxlen=size)
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._order)

    def add(self, value: float) -> None:
        if len(self._order) == self._order.maxlen:
            del self._sorted[bisect_left(self._sorted, self._order[0])]
        self._order.append(value)
        insort(self._sorted, value)

    def quantile(self, share: float) -> float:
        """The least value that `share` of the values do not exceed; 0.0 without values."""
        if not self._sorted:
            return 0.0
        return self._sorted[min(len(self._sorted), max(1, ceil(share * len(self._sorted)))) - 1]

    def largest_within(self, limit: float, *, besides: int = 0) -> float:
        """The largest value that does not exceed `limit`, without the `besides` largest ones of these; 0.0 if there is
        none."""
        at = bisect_right(self._sorted, limit) - 1 - besides
        return self._sorted[at] if at >= 0 else 0.0

    def forget_oldest(self) -> None:
        """Remove the oldest value, if there is any."""
        if self._order:
            del self._sorted[bisect_left(self._sorted, self._order.popleft())]


class CostLine:
    """A line and a margin. `memory`: the number of observations that count; `margin`: the quantile of `predicted`."""

    def __init__(self, *, memory: int = 256, margin: float = 0.95) -> None:
        self._fade, self._margin = 1.0 - 1.0 / memory, margin
        self._weight = self._x = self._y = self._xx = self._xy = 0.0  # faded sums
        self._slope = self._base = 0.0
        self._flat = 0.0  # smaller sizes cost as much as this one
        self._over = RecentValues(min(128, memory))
        self._ratio = 1.0
        self.count = 0

    def observe(self, size: float, cost: float) -> None:
        """Learn the cost of a size. Values that are not positive and finite are ignored."""
        if not (0.0 < size < inf and 0.0 < cost < inf):
            return
        if self.count:
            ratio = cost / self.typical(size)
            self._over.add(ratio)
            self._ratio = max(1.0, self._over.quantile(self._margin))
            if self.count >= ENOUGH:
                cost = min(cost, cost / ratio * _OUTLIER)
        self.count += 1
        fade = self._fade
        self._weight = fade * self._weight + 1.0
        self._x = fade * self._x + size
        self._y = fade * self._y + cost
        self._xx = fade * self._xx + size * size
        self._xy = fade * self._xy + size * cost
        self._fit()

    def typical(self, size: float) -> float:
        """The cost of `size` by the line; infinite before the first observation."""
        return max(_LEAST_S, self._base + self._slope * max(size, self._flat)) if self.count else inf

    def predicted(self, size: float) -> float:
        """The cost of `size` at the margin's quantile."""
        return self.typical(size) * self.factor

    def size_within(self, cost: float) -> float:
        """The largest size that is predicted to cost no more; infinite if the line is flat, 0.0 if there is none."""
        left = cost / self.factor
        if not self.count or left < self.typical(0.0):
            return 0.0
        return (left - self._base) / self._slope if self._slope > 0 else inf

    @property
    def factor(self) -> float:
        """The margin, as a multiple of the line."""
        return self._ratio * (1.0 if self.count >= ENOUGH else _UNSURE)

    def _fit(self) -> None:
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        self._flat = 0.0
        if variance < (_APART * mean_x) ** 2:
            self._base, self._slope, self._flat = 0.0, mean_y / mean_x, mean_x
            return
        slope = (self._xy / self._weight - mean_x * mean_y) / variance
        base = mean_y - slope * mean_x
        if base < 0.0:
            base, slope = 0.0, mean_y / mean_x
        elif slope < 0.0:
            base, slope = mean_y, 0.0
        self._base, self._slope = base, slope


#: At a hundred steps a second this many are a few seconds.
_MEMORY: Final = 256
_MARGIN: Final = 0.95
#: How many times longer a step beside served work is taken to last until such steps were seen.
_BESIDE: Final = 2.0
#: The largest size seen shrinks by this with each step, so that an old one expires.
_SHRINK: Final = 0.999
_GROWTH: Final = 2


class StepTime:
    """Predicts how long a rollout step takes by its tokens, alone and beside served work. `first_tokens`: of a step
    while nothing is known. There is no prediction for a step of more than twice the tokens seen lately."""

    def __init__(self, first_tokens: int) -> None:
        self._first = first_tokens
        self._alone = CostLine(memory=_MEMORY, margin=_MARGIN)
        self._beside = RecentValues(64)  # durations beside served work, as multiples of those alone
        self._largest = 0.0
        self.usual_s = 0.0  #: what steps took lately, on average; 0.0 while nothing is known

    def observe(self, tokens: int, seconds: float, *, beside: bool = False) -> None:
        """A step of `tokens` took `seconds`; `beside`: served work went on during it."""
        if tokens <= 0 or not 0.0 < seconds < inf:
            return
        self._largest = max(float(tokens), self._largest * _SHRINK)
        usual = min(seconds, _OUTLIER * self._alone.typical(tokens))
        self.usual_s += (usual - self.usual_s) * (0.05 if self.usual_s else 1.0)
        if not beside:
            self._alone.observe(tokens, seconds)
        elif self._alone.count:
            self._beside.add(seconds / self._alone.typical(tokens))

    def doubt_beside(self) -> None:
        """Forget the oldest step beside served work. Durations that were seen under a disturbance forbid such steps,
        and then no new one is seen that could say otherwise."""
        self._beside.forget_oldest()

    def predicted(self, tokens: int, *, beside: bool = False) -> float:
        """Seconds of a step, at a quantile; infinite while nothing is known."""
        return self._alone.typical(tokens) * self._factor(beside)

    @property
    def most_s(self) -> float:
        """Seconds of a step of the largest recent size beside served work; 0.0 while nothing is known."""
        return self.predicted(round(self._largest), beside=True) if self._alone.count else 0.0

    def tokens_within(self, seconds: float, *, beside: bool = False) -> int:
        """The most tokens of a step that is predicted to take no longer; 0: none. With infinite time and nothing known,
        those of a first step."""
        most = max(self._first, int(_GROWTH * self._largest))
        if seconds == inf:
            return most
        # `size_within` applies the margin of a step alone; it is replaced by the one of `beside`.
        size = self._alone.size_within(seconds * self._alone.factor / self._factor(beside))
        return int(min(most, size + 1e-9))

    @property
    def beside_ratio(self) -> float:
        """A step's duration beside served work as a multiple of that alone, at the median."""
        return self._beside.quantile(0.5) or _BESIDE

    def overran(self, tokens: int, seconds: float, *, beside: bool = False) -> bool:
        """Whether a step took much longer than predicted; False until enough steps were seen."""
        return self._alone.count >= ENOUGH and seconds > 1.5 * self.predicted(tokens, beside=beside) + 0.002

    def _factor(self, beside: bool) -> float:
        if not beside:
            return self._alone.factor
        seen = self._beside.quantile(_MARGIN) if len(self._beside) >= 2 * ENOUGH else _BESIDE
        return max(self._alone.factor, seen)


#: Requests needed before the engine's latency counts as known.
LEARNT: Final = 20


class UnloadedLatency:
    """The latency of an unloaded serving engine, learnt from its traffic.

    Invariant: a latency is learnt only from requests without other requests or rollouts beside them. Decode steps are
    learnt by the number of requests in them, so other requests may decode too, as long as none waits for its first
    token.
    """

    def __init__(self) -> None:
        self._prefill = CostLine(memory=_MEMORY, margin=0.9)
        self._decode = CostLine(memory=_MEMORY, margin=0.9)
        self._ttft = RecentValues(_MEMORY)
        self._tpot = RecentValues(_MEMORY)

    def began(self, prompt_tokens: int, seconds: float) -> None:
        """A request without others beside it had its first token after `seconds`."""
        self._prefill.observe(max(1, prompt_tokens), seconds)
        self._ttft.add(seconds)

    def finished(self, tokens: int, seconds: float) -> None:
        """A request without others beside it made `tokens` in `seconds` after its first token."""
        if tokens > 0 and seconds > 0:
            self._tpot.add(seconds / tokens)

    def decoded(self, batch: int, seconds: float) -> None:
        """One of `batch` requests that decode made a token `seconds` after its previous one."""
        self._decode.observe(batch, seconds)

    def prefill_s(self, prompt_tokens: int) -> float:
        """From the start of a request's prefill to its first token, at a quantile; infinite while unknown."""
        return self._prefill.predicted(max(1, prompt_tokens))

    def typical_prefill_s(self, prompt_tokens: int) -> float:
        """The same without a margin."""
        return self._prefill.typical(max(1, prompt_tokens))

    def decode_s(self, batch: int) -> float:
        """From one token of a request to its next in a batch, at a quantile; infinite while unknown."""
        return self._decode.predicted(batch) if batch else 0.0

    def typical_decode_s(self, batch: int) -> float:
        """The same without a margin."""
        return self._decode.typical(max(1, batch))

    def ttft_s(self, percentile: float) -> float:
        """TTFT without load; 0.0 until enough requests were seen."""
        return self._ttft.quantile(percentile / 100) if len(self._ttft) >= LEARNT else 0.0

    def tpot_s(self, percentile: float) -> float:
        """TPOT without load; 0.0 until enough requests were seen."""
        return self._tpot.quantile(percentile / 100) if len(self._tpot) >= LEARNT else 0.0

    @property
    def usual_decode_s(self) -> float:
        """Time per token of a single request, without a margin; infinite until enough were seen."""
        return self.typical_decode_s(1) if self._decode.count >= LEARNT else inf
