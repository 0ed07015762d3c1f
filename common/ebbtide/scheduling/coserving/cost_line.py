"""Learns online what something costs by its size: a line through recent observations, and a margin above it.

The line is a least-squares fit in which older observations weigh less. The margin is a quantile of how far the last
observations were above the line, as in conformal prediction, so no assumption about their distribution is needed.

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
#: A cost counts for at most this multiple of the line, so that an outlier does not bend it.
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
