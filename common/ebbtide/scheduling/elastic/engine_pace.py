"""Tabulates how long a typical engine takes for a token of each rollout, by its load and by the length of contexts.

Learnt speeds are asked for a few loads and two lengths. A token takes a fixed part and parts by load and context, so
what is between is interpolated in seconds per token.
"""

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

#: No engine is slower: a longer time would only hide that nothing is known.
_SLOWEST: Final = 1e-6
#: Contexts at which speeds are asked are so many tokens apart at least.
_APART: Final = 256.0


class EnginePace:
    """`rate`: tokens/s of each of so many rollouts of such a mean context in a typical engine; `batch`: the most that it
    runs; `contexts`: the shortest and longest mean context, in tokens.
    """

    def __init__(self, rate: Callable[[float, float], float], *, batch: float, contexts: tuple[float, float]) -> None:
        loads = [1.0]
        while 2.0 * loads[-1] < batch:
            loads.append(2.0 * loads[-1])
        self._loads = np.array([*loads, max(1.0, batch)])
        low = contexts[0]
        high = max(contexts[1], low + _APART)
        short, long = (
            np.array([1.0 / max(_SLOWEST, rate(load, context)) for load in self._loads.tolist()])
            for context in (low, high)
        )
        self._by_context = np.maximum(0.0, (long - short) / (high - low))  # no engine is faster with longer ones
        self._fixed = short - self._by_context * low

    def by_running(self, most: int, engines: float, weight: float) -> tuple[Floats, Floats]:
        """Seconds per token of each of 0 to `most` running rollouts in so many engines: a fixed part, and the part per
        token of mean context. Loads below one in each engine are as fast as one. `weight`: so many does each stand for.
        """
        loads = np.arange(most + 1) * (weight / max(1e-9, engines))
        return np.interp(loads, self._loads, self._fixed), np.interp(loads, self._loads, self._by_context)
