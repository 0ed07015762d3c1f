"""Says of a group's samples how many tokens are still to come, on average and by quantiles."""

from collections.abc import Sequence
from math import log
from typing import Final, NamedTuple

from ebbtide.scheduling.long_tail.length_marginal import LengthMarginal
from ebbtide.scheduling.long_tail.shared_part import SampleTail, SharedPart, quantile_beyond

#: Pieces of the integral of a mean. Those of a sample that runs are shortest where it is now.
_PIECES: Final = 24


#: The share of the lengths within which a sample is expected to end: one of five is longer.
LONGEST_SHARE: Final = 0.8
_SHARES: Final = (0.1, 0.5, LONGEST_SHARE, 0.9)


class LengthOutlook(NamedTuple):
    """Tokens that a sample has still to come: the mean, and quantiles. They are at least 1 below the cap."""

    expected: float
    tenth: float
    half: float
    longest: float  # not exceeded with probability `LONGEST_SHARE`
    ninth: float  # nine in ten samples make no more


class LengthForecast:
    """Of one group. A sample is asked about by the tokens that it has made; samples that made the same are alike.

    Tokens made must be those of the open group that was asked about, or 0.
    """

    def __init__(self, marginal: LengthMarginal, part: SharedPart, within: float, cap: int) -> None:
        self._marginal, self._part, self._within, self._cap = marginal, part, within, float(cap)
        self._tails: dict[int, SampleTail] = {}

    def length(self, made: int, share: float) -> float:
        """The whole length, in tokens, that the sample does not exceed with probability `share` (0 to 1, both
        excluded). It is at least one more than `made`, and at most the cap.
        """
        return self._bounded(made, self._marginal.tokens(self._tail(made).quantile(share)))

    def rest(self, made: int) -> float:
        """The mean of the tokens to come, at least 1 below the cap."""
        return self.outlook(made).expected

    def outlook(self, made: int) -> LengthOutlook:
        """Mean and quantiles of the tokens to come, from one table of the sample's distribution: each of the quantiles
        costs nothing more, and is within some hundredths of what `length` says.
        """
        tail, marginal = self._tail(made), self._marginal
        begin, end = max(self._score(made), tail.bottom), min(tail.top, marginal.score(self._cap))
        least = self._bounded(made, 0.0) - made
        if end <= begin:
            return LengthOutlook(least, least, least, least, least)
        early = begin > self._score(made)
        mean, at, beyond = 0.0, max(marginal.tokens(begin), float(made)), 1.0
        found, wanted = list[float](), 0
        for piece in range(1, _PIECES + 1):
            share = piece / _PIECES
            score = begin + (end - begin) * (share if early else share * share)
            tokens, further = max(at, marginal.tokens(score)), tail.beyond(score)
            mean += (beyond - further) * _between(at, tokens)
            while wanted < len(_SHARES) and further <= 1.0 - _SHARES[wanted]:
                part = (beyond - (1.0 - _SHARES[wanted])) / (beyond - further) if beyond > further else 1.0
                found.append(at * (tokens / at) ** part if at > 0.0 else tokens)
                wanted += 1
            at, beyond = tokens, further
        found += [at] * (len(_SHARES) - wanted)  # cut at the cap, or beyond what the table reaches
        tenth, half, longest, ninth = (self._bounded(made, one) - made for one in found)
        return LengthOutlook(self._bounded(made, mean + beyond * at) - made, tenth, half, longest, ninth)

    def alike(self, shared: float, samples: Sequence[tuple[int, float]]) -> list[float]:
        """Whole lengths of samples that belong together, in tokens. Simulations of a step need them: quantiles of
        single samples would lose that all of a group are long, or all are short. `shared`: the quantile of what the
        group has in common; `samples`: tokens made, and the sample's own quantile given that.
        """
        part, within, total = self._part, self._within, 0.0
        at = part.points[-1]
        for point, weight in zip(part.points, part.weights, strict=True):
            total += weight
            if total >= shared:
                at = point
                break
        found = list[float]()
        for made, share in samples:
            score = at + within * quantile_beyond((self._score(made) - at) / within, share)
            found.append(self._bounded(made, self._marginal.tokens(score)))
        return found

    def _bounded(self, made: int, tokens: float) -> float:
        return max(min(max(tokens, made + 1.0), self._cap), float(made))

    def _tail(self, made: int) -> SampleTail:
        found = self._tails.get(made)
        if found is None:
            found = self._tails[made] = SampleTail(self._part, self._within, self._score(made))
        return found

    def _score(self, made: int) -> float:
        return self._marginal.score(made) if made > 0 else _NOTHING


def _between(low: float, high: float) -> float:
    """The mean of lengths between two, if their scores are evenly spread: logarithms follow scores along a line."""
    return (high - low) / log(high / low) if high > low * (1.0 + _SAME) else low


#: Lengths that differ by less are equal.
_SAME: Final = 1e-6
#: The score of a sample that has made nothing: below all.
_NOTHING: Final = -6.0
