"""Models how far an engine's drafts are accepted, by how much of a sample's siblings is known.

Seer prints the mean tokens of a step, the bonus token included, for drafts from 0, 1, 5 and 15 siblings (arXiv
2511.14617 v3, section on grouped speculative decoding; the linear column of its table: 20 groups of Qwen2-VL-72B). The
shape along a draft is of suffix trees over responses drawn from phrase books that a group shares. It is bent by a power
until its sum is what Seer prints.
"""

from bisect import bisect_right
from functools import lru_cache
from math import log1p
from typing import Final

#: Siblings, and mean tokens of a step.
PRINTED: Final = ((0.0, 1.70), (1.0, 2.04), (5.0, 2.32), (15.0, 2.53))
#: Probabilities that at least 1, 2, ... 8 draft tokens are accepted, with 15 siblings.
_SHAPE: Final = (0.52, 0.40, 0.30, 0.14, 0.11, 0.07, 0.05, 0.04)
#: Siblings count in such parts.
_PARTS: Final = 4
_HALVINGS: Final = 40


def step_tokens(siblings: float) -> float:
    """Mean tokens of a step with drafts of up to 8 tokens: a line in the logarithm between the printed points."""
    if siblings >= PRINTED[-1][0]:
        return PRINTED[-1][1]
    at = bisect_right(PRINTED, (siblings, float("inf"))) - 1
    (begin, low), (end, high) = PRINTED[at], PRINTED[at + 1]
    share = (log1p(siblings) - log1p(begin)) / (log1p(end) - log1p(begin))
    return low + share * (high - low)


def sibling_survival(siblings: float) -> tuple[float, ...]:
    """Probabilities that at least 1, 2, ... 8 draft tokens are accepted. `siblings`: a running one counts for the share
    of its response that is made.
    """
    return _survival(round(_PARTS * max(0.0, siblings)))


@lru_cache(maxsize=256)
def _survival(parts: int) -> tuple[float, ...]:
    wanted = step_tokens(parts / _PARTS) - 1.0
    low, high = 0.2, 5.0
    for _ in range(_HALVINGS):
        power = 0.5 * (low + high)
        low, high = (power, high) if sum(one**power for one in _SHAPE) > wanted else (low, power)
    return tuple(one**low for one in _SHAPE)
