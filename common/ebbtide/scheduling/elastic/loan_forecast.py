"""Forecasts for borrowers how long a trainer's device stays lent or held, and in which share of the time it is lent.

The owner may say how long its wish will stand. Otherwise the expected rest follows from earlier spells that lasted
longer than this one has; if none did, the rest is expected to be as long as the spell so far.

Invariant: the device is either lent or held; `_since` is when the present spell began. Lost with the process; a few
steps teach it again.
"""

from collections import deque
from statistics import fmean
from typing import Final

from ebbtide.types.grants import Forecast

#: Spells of each kind that count: a run's steps resemble the latest ones.
_MEMORY: Final = 16
_MINUTE_S: Final = 60.0


class LoanForecast:
    """`now` is in seconds of any one clock."""

    def __init__(self) -> None:
        self._spells = {True: deque[float](maxlen=_MEMORY), False: deque[float](maxlen=_MEMORY)}
        self._lent = False
        self._since: float | None = None
        self._ends: float | None = None  # when the present spell ends, as the owner says

    def turn(self, now: float, *, lent: bool, spell_s: float = 0.0) -> None:
        """The device is lent or held from now on. `spell_s`: for how long, as its owner says; 0: it does not say."""
        if self._since is None or lent is not self._lent:
            if self._since is not None:
                self._spells[self._lent].append(max(0.0, now - self._since))
            self._since, self._ends = now, None
        self._lent = lent
        if spell_s > 0.0:
            self._ends = now + spell_s

    def forecast(self, now: float) -> Forecast:
        left = self._left(now)
        soon = min(1.0, left / _MINUTE_S)
        return Forecast(share=soon * self._lent + (1.0 - soon) * self._usual(), spell_s=left)

    def _left(self, now: float) -> float:
        if self._since is None:
            return 0.0
        if self._ends is not None and self._ends > now:
            return self._ends - now
        lasted = max(0.0, now - self._since)
        longer = [spell - lasted for spell in self._spells[self._lent] if spell > lasted]
        return fmean(longer) if longer else lasted

    def _usual(self) -> float:
        """The share of the time in which the device is lent; until both kinds are known, that of the present kind."""
        lent, held = self._spells[True], self._spells[False]
        if not lent or not held:
            return float(self._lent)
        return fmean(lent) / max(1e-9, fmean(lent) + fmean(held))
