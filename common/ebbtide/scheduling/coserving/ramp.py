"""Sets the share of capacity that rollouts use: less after trouble, more in calm, none just after served work.

Growth is additive and cuts are multiplicative (Chiu and Jain 1989). As in TCP, the level of the last trouble is kept:
growth is slow near it and fast elsewhere, so the level converges instead of oscillating. The quiet time after served
work is the one with the least cost: waiting loses idle time, and a step without waiting delays the next request.

Invariant: `level` is between `LEAST` and 1, and changes only by cuts and by calm. Neither the start of a training step
nor the end of an idle spell resets it.
"""

from bisect import bisect_right
from typing import Final

LEAST: Final = 1.0 / 16
#: From nothing to everything in eight calm periods, and sixteen times slower near the level of the last trouble.
_GROWTH: Final = 1.0 / 8
_SLOW_GROWTH: Final = 1.0 / 128
_NEAR: Final = 0.75
_CUT: Final = 0.5
#: After more than this many periods between two calls of `calm`, rollouts have not run all the time.
_RESTS: Final = 4
#: The level of the last trouble is kept for this long.
_FORGOTTEN_S: Final = 10.0
#: Candidates for the quiet time, as parts of the span between the least and the most.
_TRIED: Final = (0.0, 0.02, 0.06, 0.16, 0.36, 0.6, 1.0)
#: One second of a request's delay costs as much as this many seconds of idle time.
_DELAY_WEIGHS: Final = 4.0
_LONG_S: Final = 1.0  # longer gaps count as this
_ENOUGH: Final = 32
_FADE: Final = 1.0 - 1.0 / 256


class Ramp:
    """The level. `period_s`: of calm, for one step of growth."""

    def __init__(self, period_s: float = 0.01) -> None:
        self._period = period_s
        self._trouble_level = 1.0
        self._trouble_at = self._grown_at = self._seen_at = float("-inf")
        self.level = 1.0

    def cut(self, now: float, used: float) -> None:
        """Cut the level after trouble while `used` of the capacity ran. There is one cut per period, because troubles
        close together have one cause."""
        if now - self._trouble_at < self._period:
            return
        used = min(self.level, used)
        self._trouble_level, self._trouble_at, self._grown_at, self._seen_at = used, now, now, now
        self.level = max(LEAST, _CUT * used)

    def calm(self, now: float) -> float:
        """Rollouts run without trouble: grow the level and return it."""
        if self.level >= 1.0:
            return 1.0
        if now - self._seen_at > _RESTS * self._period:  # time without rollouts is not calm
            self._grown_at = now
        self._seen_at = now
        while self._grown_at + self._period <= now and self.level < 1.0:
            self._grown_at += self._period
            near = _NEAR * self._trouble_level if now - self._trouble_at < _FORGOTTEN_S else 1.0
            self.level = min(1.0, max(self.level + _SLOW_GROWTH, min(near, self.level + _GROWTH)))
        return self.level


class Quiet:
    """Learns how long rollouts should wait after the last served request left, from how soon the next ones came."""

    def __init__(self, first_s: float, least_s: float, most_s: float) -> None:
        self._tried = tuple(least_s + part * (most_s - least_s) for part in _TRIED)
        self._counts = [0.0] * (len(_TRIED) + 1)  # of gaps between two candidates
        self._sums = [0.0] * (len(_TRIED) + 1)
        self._seen = 0
        self.seconds = first_s

    def came(self, gap_s: float, step_s: float) -> None:
        """A request came `gap_s` after the last one had left; a rollout step takes `step_s`."""
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
        """Idle seconds lost, and the delay of requests that come after the quiet time: half a step each."""
        at = self._tried.index(quiet)
        short, longer = sum(self._sums[: at + 1]), sum(self._counts[at + 1 :])
        return short + longer * (quiet + _DELAY_WEIGHS * 0.5 * step_s)
