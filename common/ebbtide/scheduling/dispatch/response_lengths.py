"""Predicts how many tokens a rollout will still make, from the lengths of the run's finished ones.

Responses have a heavy tail: the longer one is, the more tokens are to be expected (its mean residual life rises).
Invariant: `_count` and `_sum` hold the finished lengths, older ones fading, in bins that grow by a tenth. Lost with
the process; a few dozen finished rollouts teach it again.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import exp, log
from operator import mul
from typing import Final

_GROWTH: Final = 1.1
_BINS: Final = 160  # up to some four million tokens
#: After so many finished lengths, all weights are halved.
_MEMORY: Final = 16_384
#: Prior: a response has as many tokens to come as it has, at least so many; it weighs as much as so many finished ones.
_LEAST_TOKENS: Final = 256.0
_PRIOR: Final = 4.0
#: Of the responses that come into a bin, at least this share is taken to get through it.
_LEAST_SHARE: Final = 1e-9


class ResponseLengths:
    def __init__(self) -> None:
        self._count = [0.0] * _BINS
        self._sum = [0.0] * _BINS
        self._total = 0.0
        self._above: list[tuple[float, float]] | None = None

    def finished(self, tokens: int) -> None:
        """Note that a rollout ended by itself or by its budget, with a response of so many tokens."""
        number = _bin(tokens)
        self._count[number] += 1.0
        self._sum[number] += tokens
        self._total += 1.0
        if self._total > _MEMORY:
            self._count = [0.5 * count for count in self._count]
            self._sum = [0.5 * total for total in self._sum]
            self._total *= 0.5
        self._above = None

    def rest(self, made: int, budget: int | None = None) -> float:
        """Expected tokens still to come of a response that has `made`; at most `budget`."""
        if self._above is None:
            self._above = self._tails()
        number = _bin(made)
        count, total = self._above[number]
        start, end = _GROWTH**number, _GROWTH ** (number + 1)
        longer = self._count[number] * max(0.0, min(1.0, (end - made) / (end - start)))  # of its own bin, evenly spread
        count, total = count + longer, total + longer * 0.5 * (max(made, start) + end)
        beyond = max(0.0, total - count * made)
        rest = (beyond + _PRIOR * max(_LEAST_TOKENS, float(made))) / (count + _PRIOR)
        return rest if budget is None else min(rest, float(budget))

    def outlasting(self, made: Sequence[float]) -> list[float]:
        """The shares of responses that are longer than each of these, which rise. While little is known, few are."""
        if self._above is None:
            self._above = self._tails()
        shares = []
        for tokens in made:
            number = _bin(tokens)
            start, end = _GROWTH**number, _GROWTH ** (number + 1)
            own = self._count[number] * max(0.0, min(1.0, (end - tokens) / (end - start)))
            unseen = _PRIOR * exp(-tokens / _LEAST_TOKENS)
            shares.append((self._above[number][0] + own + unseen) / (self._total + _PRIOR))
        return shares

    def survival(self, running: Iterable[int] = ()) -> tuple[list[float], list[float]]:
        """Rising lengths in tokens, and the share of responses that are at least as long as each.

        `running`: tokens that open responses have made. They count as far as they got (Kaplan and Meier, 1958): else
        those that end first, which are short, would speak for all. What is longer than all that was seen is expected to
        have as many tokens to come as it has (a Pareto tail).
        """
        open_ = [0.0] * _BINS
        for made in running:
            open_[_bin(made)] += 1.0
        edges = [_GROWTH**number for number in range(_BINS)]
        unseen = [_PRIOR * (_LEAST_TOKENS / (_LEAST_TOKENS + edge)) ** 2 for edge in edges]
        ended = [self._count[at] + unseen[at] - (unseen[at + 1] if at + 1 < _BINS else 0.0) for at in range(_BINS)]
        longer, hazards = 0.0, [0.0] * _BINS
        for at in reversed(range(_BINS)):
            longer += ended[at] + 0.5 * open_[at]  # on average these are halfway through theirs
            hazards[at] = min(1.0 - _LEAST_SHARE, ended[at] / longer)
            longer += 0.5 * open_[at]
        shares = accumulate((1.0 - hazard for hazard in hazards[:-1]), mul, initial=1.0)
        return edges, list(shares)

    def _tails(self) -> list[tuple[float, float]]:
        """For each bin, how many lengths lie in the bins above it, and their sum."""
        tails = [(0.0, 0.0)] * _BINS
        count = total = 0.0
        for number in reversed(range(_BINS)):
            tails[number] = (count, total)
            count += self._count[number]
            total += self._sum[number]
        return tails


def _bin(tokens: float) -> int:
    return min(_BINS - 1, int(log(max(1.0, tokens)) / log(_GROWTH)))
