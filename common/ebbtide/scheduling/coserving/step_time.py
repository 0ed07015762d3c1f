"""Learns how long a rollout step takes by its tokens, alone and beside served work.

Invariant: a step is never predicted to take less time than one of fewer tokens. There is no prediction for a step of
more than twice the tokens seen lately.
"""

from math import inf
from typing import Final

from ebbtide.scheduling.coserving.cost_line import ENOUGH, CostLine, RecentValues

#: At a hundred steps a second this many are a few seconds.
_MEMORY: Final = 256
_MARGIN: Final = 0.95
#: How many times longer a step beside served work is taken to last until such steps were seen.
_BESIDE: Final = 2.0
#: The largest size seen shrinks by this with each step, so that an old one expires.
_SHRINK: Final = 0.999
_GROWTH: Final = 2
#: A step counts in the mean for at most this multiple of its prediction.
_OUTLIER: Final = 4.0


class StepTime:
    """Predicts steps. `first_tokens`: of a step while nothing is known."""

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
