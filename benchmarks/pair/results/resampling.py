"""Draws what a bootstrap resamples. Neighbours are not independent, so runs of them are drawn together."""

from typing import Final

import numpy as np
import numpy.typing as npt

_RESAMPLES: Final = 1000
#: Requests, and seconds of the harvest, that are drawn together.
RUN: Final = 8

Indices = npt.NDArray[np.int64]


def drawn_runs(count: int, run: int = RUN) -> Indices:
    """Indices of `count` things, a row for each resample; empty if there are fewer than two runs of them."""
    if count < 2 * run:
        return np.empty((0, 0), np.int64)
    starts = np.random.default_rng(0).integers(0, count - run + 1, size=(_RESAMPLES, count // run))
    return (starts[..., None] + np.arange(run)).reshape(_RESAMPLES, -1)
