"""Forecasts served traffic: how long an idle spell lasts, the share of idle time, and whether a wake-up pays.

Spells are counted by length in ranges, two to a doubling, and older spells weigh less. The expected rest of a spell
follows from the spells that lasted longer. If none did, the expected rest is as long as the spell so far, because most
idle time of such traffic lies in spells of minutes.

Invariant: each moment is either idle or busy; `_since` is when the present spell began.
"""

from math import exp, log2
from typing import Final

from ebbtide.types.grants import Forecast

_SHORTEST_S: Final = 1e-3
_PER_DOUBLING: Final = 2
_RANGES: Final = 48  # to three hours and over
_FADE: Final = 1.0 - 1.0 / 1024
_MINUTE_S: Final = 60.0
#: The assumption that the rest is as long as the spell so far weighs as much as this many observed spells.
_UNSEEN: Final = 0.5
#: A wake-up pays if the usable time after it is this many times as long as the wake-up.
_WORTH: Final = 2.0
#: Time constant with which requests and misses lose weight.
_MISSES_S: Final = 300.0
#: The count begins with this many requests without a miss, and this many misses count as chance: one miss among few
#: requests exceeds the allowed share, but shows nothing about later requests.
_BEFORE: Final = 100.0
_BY_CHANCE: Final = 1.0


class IdleSpells:
    """Learns how long spells last."""

    def __init__(self) -> None:
        self._counts = [0.0] * _RANGES
        self._sums = [0.0] * _RANGES

    def ended(self, seconds: float) -> None:
        at = _range(seconds)
        for number in range(_RANGES):
            self._counts[number] *= _FADE
            self._sums[number] *= _FADE
        self._counts[at] += 1.0
        self._sums[at] += seconds

    def left(self, lasted: float) -> float:
        """How much longer a spell is expected to last, after `lasted` seconds."""
        at = _range(lasted)
        lasted = max(lasted, _SHORTEST_S)
        count, total = _UNSEEN, _UNSEEN * 2.0 * lasted
        for number in range(at, _RANGES):
            longer = self._counts[number]
            if longer and (number > at or self._sums[number] > lasted * longer):
                count += longer
                total += self._sums[number]
        return total / count - lasted


class IdleShare:
    """The recent share of time in which a condition held; older times weigh less."""

    def __init__(self, span_s: float = _MINUTE_S) -> None:
        self._span = span_s
        self._share = self._weight = 0.0
        self._at: float | None = None
        self._holds = False

    def turn(self, now: float, holds: bool) -> None:
        self._advance(now)
        self._holds = holds

    def share(self, now: float) -> float:
        """0.0 until some time has passed."""
        self._advance(now)
        return self._share / self._weight if self._weight else 0.0

    def _advance(self, now: float) -> None:
        if self._at is not None and now > self._at:
            fade = exp((self._at - now) / self._span)
            self._share = fade * self._share + (1.0 - fade) * self._holds
            self._weight = fade * self._weight + (1.0 - fade)
        self._at = now if self._at is None else max(self._at, now)


class TrafficRhythm:
    """Follows the traffic and the grants. `allowed`: the share of requests that may miss their targets."""

    def __init__(self, allowed: float) -> None:
        self._allowed = max(1e-6, allowed)
        self._idle, self._busy_spells = IdleSpells(), IdleSpells()
        self._busy, self._granted = IdleShare(), IdleShare()
        self._since: float | None = None
        self._is_busy = False
        self._requests = self._missed = 0.0
        self._served_at = 0.0

    def turn(self, now: float, busy: bool) -> None:
        """The traffic is busy, or idle, from now on."""
        if self._since is not None and busy == self._is_busy:
            return
        if self._since is not None and now > self._since:
            (self._busy_spells if self._is_busy else self._idle).ended(now - self._since)
        self._since, self._is_busy = now, busy
        self._busy.turn(now, busy)

    def grant(self, now: float, granted: bool) -> None:
        """Rollouts may run from now on, or may not."""
        self._granted.turn(now, granted)

    def served(self, now: float, *, missed: bool) -> None:
        """A request was served; `missed`: it missed a target that it would have met without rollouts."""
        self._fade(now)
        self._requests += 1.0
        self._missed += missed

    def _fade(self, now: float) -> None:
        """Lower the weight of earlier requests and misses."""
        fade = exp(min(0.0, self._served_at - now) / _MISSES_S)
        self._requests, self._missed = fade * self._requests, fade * self._missed
        self._served_at = max(now, self._served_at)

    def _disturbance(self, now: float) -> float:
        """Misses beyond chance, as a share of the allowed misses."""
        self._fade(now)
        return max(0.0, self._missed - _BY_CHANCE) / (self._allowed * (_BEFORE + self._requests))

    def load(self, now: float) -> float:
        """The share of the last minute with a request inside."""
        return self._busy.share(now)

    def left(self, now: float) -> float:
        """How much longer the present spell, idle or busy, is expected to last; 0.0 while nothing is known."""
        if self._since is None:
            return 0.0
        return (self._busy_spells if self._is_busy else self._idle).left(now - self._since)

    def forecast(self, now: float) -> Forecast:
        left = self.left(now)
        certain = min(1.0, left / _MINUTE_S)
        share = certain * (not self._is_busy) + (1.0 - certain) * self._granted.share(now)
        return Forecast(share=min(1.0, share), spell_s=left, disturbance=self._disturbance(now))

    def pays(self, now: float, wake_s: float) -> bool:
        """Whether a wake-up that takes `wake_s` gains more than it costs, in the present idle spell, or in the next
        minute if that is like the last one."""
        if self._since is None:
            return False
        spell = 0.0 if self._is_busy else self.left(now)
        idle = 1.0 - self._busy.share(now)
        return max(spell, idle * (_MINUTE_S - wake_s)) >= (1.0 + _WORTH) * wake_s


def _range(seconds: float) -> int:
    if seconds <= _SHORTEST_S:
        return 0
    return min(_RANGES - 1, 1 + int(_PER_DOUBLING * log2(seconds / _SHORTEST_S)))
