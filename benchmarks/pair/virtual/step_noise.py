"""Draws how steps are disturbed: each by itself, and both engines' by a process beside them.

A step's duration differs a little from its cost each time, and much in a rare hiccup.
"""

from math import inf
from random import Random
from typing import Final

from benchmarks.pair.virtual.pair_costs import PairCosts, StrayProcess

#: A hiccup takes this many times as long.
_HICCUP: Final = 4.0
#: Drawn in rounds of so many, because single draws cost more.
_DRAWS: Final = 1024
#: No burst is shorter, so that time goes on.
_LEAST_S: Final = 1e-4


class StepNoise:
    """One engine's noise."""

    def __init__(self, costs: PairCosts, random: Random) -> None:
        self._deviation, self._hiccup, self._random = costs.noise, costs.hiccup, random
        self._drawn: list[float] = []

    def draw(self) -> float:
        """The factor on the next step's duration."""
        if not self._drawn:
            random = self._random
            self._drawn = [random.lognormvariate(0.0, self._deviation) * self._rare() for _ in range(_DRAWS)]
        return self._drawn.pop()

    def _rare(self) -> float:
        return _HICCUP if self._hiccup and self._random.random() * self._hiccup < 1.0 else 1.0


class StrayBursts:
    """Plays a stray process. `serving` and `rollouts`: at which part of its speed each engine goes on until `until`,
    in seconds of virtual time. What it draws hangs on the seed alone, so all policies meet the same."""

    def __init__(self, stray: StrayProcess, random: Random) -> None:
        self._stray, self._random = stray, random
        self._spell_end = self._share = 0.0
        self._in_burst = True
        self.serving = self.rollouts = 1.0
        self.until = 0.0 if stray.most else inf

    def turn(self, now: float) -> None:
        """Begin the bursts, pauses and spells that are due."""
        while self.until <= now:
            if self._spell_end <= self.until:
                self._begin_spell()
            self._in_burst = not self._in_burst and self._share > 0.0
            self.until += self._lasts()
        self.serving, self.rollouts = (self._stray.serving, self._stray.rollouts) if self._in_burst else (1.0, 1.0)

    def _begin_spell(self) -> None:
        stray, random = self._stray, self._random
        self._share = random.uniform(stray.least, stray.most)
        self._spell_end = self.until + random.expovariate(1.0 / stray.spell_s)

    def _lasts(self) -> float:
        """Seconds of the burst or pause that begins."""
        if not self._share:
            return max(_LEAST_S, self._spell_end - self.until)
        mean = self._stray.burst_s
        if not self._in_burst:
            mean *= (1.0 - self._share) / self._share
        return max(_LEAST_S, self._random.expovariate(1.0 / mean))
