"""How much of what could be used is used: nothing for a moment behind served work, less after trouble, more in calm.

Additive growth, multiplicative cut (Chiu and Jain 1989), with the memory of where trouble was, as TCP has it: growth is
slow near there and fast elsewhere, so that a step response settles instead of swinging. The quiet time is what costs
least: waiting loses idle time, and not waiting disturbs a request that comes while a step is under way.

Invariant: `level` is between `LEAST` and 1, and changes by cuts and by calm alone: neither the begin of a training step
nor a spell's end sets it back.
"""

from bisect import bisect_right
from typing import Final

LEAST: Final = 1.0 / 16
#: From nothing to everything in eight quiet periods, and sixteen times slower near where there was trouble.
_GROWTH: Final = 1.0 / 8
_SLOW_GROWTH: Final = 1.0 / 128
_NEAR: Final = 0.75
_CUT: Final = 0.5
#: Asked less often than every so many periods, it did not run all the while.
_RESTS: Final = 4
#: Trouble is forgotten after so long.
_FORGOTTEN_S: Final = 10.0
#: Quiet times that are tried, as parts of the span between the least and the most.
_TRIED: Final = (0.0, 0.02, 0.06, 0.16, 0.36, 0.6, 1.0)
#: A second that a request is delayed weighs as much as so many of idle time.
_DELAY_WEIGHS: Final = 4.0
_LONG_S: Final = 1.0  # longer gaps tell nothing more
_ENOUGH: Final = 32
_FADE: Final = 1.0 - 1.0 / 256


class Ramp:
    """A level. `period_s`: of calm, for one step of growth."""

    def __init__(self, period_s: float = 0.01) -> None:
        self._period = period_s
        self._trouble_level = 1.0
        self._trouble_at = self._grown_at = self._seen_at = float("-inf")
        self.level = 1.0

    def cut(self, now: float, used: float) -> None:
        """There was trouble while `used` of everything ran. One cut per period: what comes together has one cause."""
        if now - self._trouble_at < self._period:
            return
        used = min(self.level, used)
        self._trouble_level, self._trouble_at, self._grown_at, self._seen_at = used, now, now, now
        self.level = max(LEAST, _CUT * used)

    def calm(self, now: float) -> float:
        """It runs, and there is no trouble: the level that this allows."""
        if self.level >= 1.0:
            return 1.0
        if now - self._seen_at > _RESTS * self._period:  # what did not run was not calm
            self._grown_at = now
        self._seen_at = now
        while self._grown_at + self._period <= now and self.level < 1.0:
            self._grown_at += self._period
            near = _NEAR * self._trouble_level if now - self._trouble_at < _FORGOTTEN_S else 1.0
            self.level = min(1.0, max(self.level + _SLOW_GROWTH, min(near, self.level + _GROWTH)))
        return self.level


class Quiet:
    """How long nothing runs after the last served request left, learnt from how soon the next ones came."""

    def __init__(self, first_s: float, least_s: float, most_s: float) -> None:
        self._tried = tuple(least_s + part * (most_s - least_s) for part in _TRIED)
        self._counts = [0.0] * (len(_TRIED) + 1)  # of gaps, between one tried time and the next
        self._sums = [0.0] * (len(_TRIED) + 1)
        self._seen = 0
        self.seconds = first_s

    def came(self, gap_s: float, step_s: float) -> None:
        """A request came so long after the last one had left; a rollout step takes `step_s`."""
        gap_s = min(gap_s, _LONG_S)
        for number in range(len(self._counts)):
            self._counts[number] *= _FADE
            self._sums[number] *= _FADE
        at = bisect_right(self._tried, gap_s)
        self._counts[at] += 1.0
        self._sums[at] += gap_s
        self._seen += 1
        if self._seen >= _ENOUGH:
            self.seconds = min(self._tried, key=lambda quiet: self._cost(quiet, step_s))

    def _cost(self, quiet: float, step_s: float) -> float:
        """Idle seconds lost, and the delay of those that come after the quiet time: half a step each."""
        at = self._tried.index(quiet)
        short, longer = sum(self._sums[: at + 1]), sum(self._counts[at + 1 :])
        return short + longer * (quiet + _DELAY_WEIGHS * 0.5 * step_s)
