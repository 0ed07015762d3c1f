"""Draws responses of a toy model of lengths, in which a token takes one unit of time and no slot is short.

The model is fitted to the lengths of RollPacker's figure: median about 660 tokens, 95th percentile about 4,200.
"""

from functools import cache
from math import sqrt
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: Log-length is normal, and has a heavier tail from this score on.
_LOG_MEDIAN, _LOG_SPREAD, _TAIL_SLOPE, _TAIL_FROM = 6.49, 0.78, 0.95, 1.05
_SHORTEST, CAP = 5.0, 16_384.0
#: Scores over which the mean is computed: more change it by less than one in a million.
_GRID: Final = 200_001


class Responses(NamedTuple):
    """Arrays of shape (prompts, samples). `own`: the part of the score that is the response's own, of unit variance."""

    lengths: Floats
    scores: Floats
    own: Floats


def drawn(draw: np.random.Generator, prompts: int, samples: int, shared: float) -> Responses:
    """`shared`: share of the scores' variance that is the prompt's."""
    return of_prompts(draw, draw.standard_normal(prompts), samples, shared)


def of_prompts(draw: np.random.Generator, prompts: Floats, samples: int, shared: float) -> Responses:
    """Responses to prompts whose own scores are given, shape (prompts,)."""
    own = draw.standard_normal((len(prompts), samples))
    scores = sqrt(shared) * prompts[:, None] + sqrt(1.0 - shared) * own
    return Responses(tokens(scores), scores, own)


def tokens(scores: Floats) -> Floats:
    tail = np.where(scores > _TAIL_FROM, np.exp(_TAIL_SLOPE * (scores - _TAIL_FROM)), 1.0)
    lengths: Floats = np.clip(np.exp(_LOG_MEDIAN + _LOG_SPREAD * scores) * tail, _SHORTEST, CAP)
    return lengths


@cache
def mean_tokens() -> float:
    """The true mean length, by the trapezoid rule."""
    scores = np.linspace(-8.0, 8.0, _GRID)
    weights = np.exp(-0.5 * scores**2)
    return float(np.sum(tokens(scores) * weights) / np.sum(weights))
