"""Learns how long a run's phases take, as a distribution that follows drift: a rollout's time, or a training phase's.

Times are taken by their logarithms. Their level is a mean in which older phases fade, since responses grow or shrink
while a policy learns; what is left of each phase by the level of its moment is kept, and its quantiles spread the
forecast around the newest level. Until phases were seen, what the run's submitter expects stands in, and counts as two
of them. `run_groups.py` plans by these forecasts, whose own error is part of what it reckons with.

Fed at the end of each phase, by the simulator (`lab/ebbtide/simulator/shared_devices.py`) as by the coordinator's
keeper of turns.

Invariant: `_level` is the faded mean of the logarithms. Lost with the process; some ten phases teach it again.
"""

from collections import deque
from math import exp, log, sqrt
from statistics import NormalDist
from typing import Final

from ebbtide.coordinator.rules.phase_turns import PhaseForecast

#: The weight of the newest phase, once there are enough: those of the last ten phases have two thirds of the weight.
_NEWEST: Final = 0.1
#: An expectation counts as so many phases, and is wrong by this standard deviation of its logarithm.
_EXPECTED_PHASES: Final = 2.0
_EXPECTED_ERROR: Final = 0.2
#: The spread that is assumed until it is known, of logarithms.
_SPREAD: Final = 0.15
#: Deviations that are remembered, and those after which they alone tell the spread.
_REMEMBERED: Final = 64
_ENOUGH: Final = 8
#: Values of a forecast: the means of so many equal parts of the distribution, in an order in which neighbours differ.
_VALUES: Final = 8
_ORDER: Final = (3, 6, 1, 4, 7, 0, 5, 2)
_NORMAL: Final = tuple(NormalDist().inv_cdf((at + 0.5) / _VALUES) for at in range(_VALUES))
#: A forecast is made anew when the level or the error differs by so much: plans depend on it, and small changes would
#: only make them again.
_RENEWED: Final = 0.05
_LEAST_S: Final = 1e-3


class PhaseTimes:
    """Of one phase of one run. `expected_s`: what its submitter expects, if anything is known."""

    def __init__(self, expected_s: float | None = None) -> None:
        self._level = log(max(_LEAST_S, expected_s)) if expected_s is not None else 0.0
        self._weight = _EXPECTED_PHASES if expected_s is not None else 0.0
        self._deviations: deque[float] = deque(maxlen=_REMEMBERED)
        self._told: PhaseForecast | None = None
        self._told_of = (0.0, 0.0)  # level and error
        self.count = 0  # of the phases that were seen

    @property
    def known(self) -> bool:
        """Whether anything is: no forecast can be made otherwise."""
        return self._weight > 0.0

    def observe(self, seconds: float) -> None:
        """A phase took so long, without what it waited for its devices."""
        value = log(max(_LEAST_S, seconds))
        if self._weight > 0.0:
            # By the level before it: what a forecast was wrong by is what the next one may be wrong by.
            self._deviations.append(value - self._level)
        self._weight += 1.0
        self._level += max(_NEWEST, 1.0 / self._weight) * (value - self._level)
        self.count += 1

    def quantile(self, share: float) -> float:
        """Seconds that the next phase will not exceed with probability `share` (0 to 1, both excluded)."""
        at = min(max(share, 1e-6), 1.0 - 1e-6)
        if len(self._deviations) < _ENOUGH:
            return exp(self._level + self._spread() * NormalDist().inv_cdf(at))
        ranked = sorted(self._deviations)
        place = at * (len(ranked) + 1) - 1.0
        low = min(max(int(place), 0), len(ranked) - 2)
        # Beyond the ends by the distance of the outermost two: a quantile of few values lies outside of them.
        return exp(self._level + ranked[low] + (place - low) * (ranked[low + 1] - ranked[low]))

    def forecast(self) -> PhaseForecast:
        """What the next phases will take. The same object until what is known differs noticeably. Raises `ValueError`
        if nothing is known.
        """
        if not self.known:
            raise ValueError("phase times: nothing was expected or seen; give expected_s or observe a phase first")
        known = self._level, self._error()
        if self._told is None or max(abs(new - old) for new, old in zip(known, self._told_of, strict=True)) > _RENEWED:
            values = [self._value(at) for at in _ORDER]
            self._told, self._told_of = PhaseForecast.of(*values, error=known[1]), known
        return self._told

    def _value(self, at: int) -> float:
        if len(self._deviations) < _ENOUGH:
            spread = self._spread()
            return exp(self._level + spread * _NORMAL[at] - 0.5 * spread**2)
        return self.quantile((at + 0.5) / _VALUES)

    def _spread(self) -> float:
        seen = len(self._deviations)
        known = sum(one * one for one in self._deviations) / seen if seen else 0.0
        weight = min(1.0, seen / _ENOUGH)
        return sqrt(weight * known + (1.0 - weight) * _SPREAD**2)

    def _error(self) -> float:
        """Of the level: by the weights that phases have in it, and of what was expected, until they outweigh it."""
        phases = min(max(self._weight, 1.0), 2.0 / _NEWEST - 1.0)
        expected = _EXPECTED_ERROR * _EXPECTED_PHASES / (_EXPECTED_PHASES + self.count)
        return sqrt(self._spread() ** 2 / phases + expected**2)
