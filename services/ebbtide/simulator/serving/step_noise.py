"""Draws by how much a step's duration differs from its cost: a little each time, and much in a rare hiccup."""

from math import exp
from random import Random
from typing import Final

from ebbtide.simulator.serving.pair_costs import PairCosts

#: A hiccup takes this many times as long.
_HICCUP: Final = 4.0
#: Drawn in rounds of so many, because single draws cost more.
_DRAWS: Final = 1024


class StepNoise:
    """One engine's noise. `mean`: the expected factor."""

    def __init__(self, costs: PairCosts, random: Random) -> None:
        self._deviation, self._hiccup, self._random = costs.noise, costs.hiccup, random
        self._drawn: list[float] = []
        self.mean = exp(costs.noise**2 / 2) * (1.0 + ((_HICCUP - 1.0) / costs.hiccup if costs.hiccup else 0.0))

    def draw(self) -> float:
        """The factor on the next step's duration."""
        if not self._drawn:
            random = self._random
            self._drawn = [random.lognormvariate(0.0, self._deviation) * self._rare() for _ in range(_DRAWS)]
        return self._drawn.pop()

    def _rare(self) -> float:
        return _HICCUP if self._hiccup and self._random.random() * self._hiccup < 1.0 else 1.0
