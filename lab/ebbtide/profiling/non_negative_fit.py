"""Fits costs that cannot be negative to measured times, and tells how far the fit is from them."""

from collections.abc import Sequence
from itertools import combinations
from typing import Final

import numpy as np
import numpy.typing as npt

from ebbtide.simulator.engines.engine_profile import FitErrors

Array = npt.NDArray[np.float64]

#: An observation counts in full up to this multiple of the usual relative error, and less beyond it (Huber 1964):
#: other programs held it up.
_USUAL: Final = 3.0
_ROUNDS: Final = 8
#: A fit may give an observation no time at all; nothing can be relative to that.
_SHORTEST_S: Final = 1e-6


def least_squares(matrix: Array, target: Array) -> Array:
    """Coefficients of at least 0 with the least squared error, (n,), for a matrix of (m, n).

    The best fit has some coefficients at 0, and is the plain fit on the others. So all choices are tried: n is small.
    """
    rows, columns = matrix.shape
    scale = np.maximum(np.abs(matrix).max(axis=0), np.finfo(float).tiny)
    best, least = np.zeros(columns), float(target @ target)
    for size in range(1, min(rows, columns) + 1):
        for chosen in combinations(range(columns), size):
            part = matrix[:, chosen] / scale[list(chosen)]
            found = np.linalg.lstsq(part, target, rcond=None)[0]
            if (found < 0).any():
                continue
            error = float(((part @ found - target) ** 2).sum())
            if error < least * (1.0 - 1e-9):  # of equal fits the one with fewer costs
                best, least = np.zeros(columns), error
                best[list(chosen)] = found / scale[list(chosen)]
    return best


def fit_costs(matrix: Array, seconds: Array) -> tuple[Array, Array]:
    """Costs per unit of each column, and the relative errors of the observations. Relative errors are made small.

    They are relative to the fitted times: relative to the measured ones, an observation that is too short by chance
    would count for more than one that is too long, and all costs would come out too low.
    """
    weights, scale = np.ones(len(seconds)), seconds
    for _ in range(_ROUNDS):
        factor = np.sqrt(weights) / scale
        costs = least_squares(matrix * factor[:, None], seconds * factor)
        scale = np.maximum(matrix @ costs, _SHORTEST_S)
        errors = np.abs(seconds / scale - 1.0)
        usual = max(float(np.median(errors)), 1e-9)
        weights = 1.0 / np.maximum(1.0, errors / (_USUAL * usual))
    return costs, np.abs(matrix @ costs / seconds - 1.0)


def fit_errors(errors: Sequence[float] | Array) -> FitErrors:
    return FitErrors(
        observations=len(errors),
        median=float(np.median(errors)),
        p90=float(np.quantile(errors, 0.9)),
        worst=float(np.max(errors)),
    )
