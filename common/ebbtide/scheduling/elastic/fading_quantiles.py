"""Learns how a quantity spreads: quantiles of its newest observations.

The p-th quantile of n observations stands between the two whose ranks enclose p (n + 1). If the next observation is as
likely to have any rank as the others, it lies below that quantile in a share p of all cases, whatever the distribution.

Invariant: `_values` has the newest observations, at most `memory`. Lost with the process; a few steps teach it again.
"""

from collections import deque
from collections.abc import Sequence
from math import isfinite

#: Observations that count: some dozens tell a tenth from a half, and forget what the policy's growth has made untrue.
_MEMORY = 48


class FadingQuantiles:
    """`prior`: what stands for observations until there are as many real ones."""

    def __init__(self, prior: Sequence[float] = (), *, memory: int = _MEMORY) -> None:
        self._prior = tuple(prior)
        self._values: deque[float] = deque(maxlen=memory)

    def observe(self, value: float) -> None:
        """Note an observation. What is not finite is ignored."""
        if isfinite(value):
            self._values.append(value)

    @property
    def known(self) -> bool:
        """Whether there is an observation, or a prior."""
        return bool(self._values or self._prior)

    def quantile(self, share: float) -> float:
        """The value below which the next one lies with probability `share`. Call only if something is `known`."""
        values = sorted([*self._prior[len(self._values) :], *self._values])
        rank = min(max(share * (len(values) + 1) - 1.0, 0.0), len(values) - 1.0)
        low = int(rank)
        high = min(low + 1, len(values) - 1)
        return values[low] + (rank - low) * (values[high] - values[low])
