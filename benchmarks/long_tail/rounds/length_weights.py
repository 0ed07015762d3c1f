"""Weights kept responses by the inverse of the share in which lengths like theirs are kept.

The true distribution is estimated from the races over fresh prompts: by the product limit, with the samples that were
aborted at risk until then. A race aborts by rank within a prompt, so the estimate's premise, that aborts do not depend
on what is left, does not hold where lengths of a prompt are alike. The experiment says how much that matters.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from benchmarks.long_tail.rounds.toy_responses import Floats

#: Classes of length with a weight each. With many more the longest ones have too few responses.
_CLASSES: Final = 200
#: Longer classes, with fewer samples at risk than this, are not estimated one by one: they share what is left.
_AT_RISK: Final = 200


def censoring_weights(kept: Sequence[Floats], ended: Floats, aborted: Floats) -> list[Floats]:
    """A weight for each kept response, of mean 1. `ended`: lengths of all that ended in races over fresh prompts;
    `aborted`: tokens that the others had made."""
    lengths = np.concatenate([one.ravel() for one in kept])
    edges = np.unique(np.quantile(lengths, np.linspace(0.0, 1.0, _CLASSES + 1)[1:-1]))
    ends, aborts, have = (
        np.bincount(np.searchsorted(edges, one), minlength=len(edges) + 1) for one in (ended, aborted, lengths)
    )
    at_risk = (ends + aborts)[::-1].cumsum()[::-1] - 0.5 * aborts  # half of a class's aborts come before its ends
    seen = int(np.argmax(np.append(at_risk < _AT_RISK, True)))
    alive = np.concatenate([[1.0], np.cumprod(1.0 - ends[:seen] / at_risk[:seen])])
    share = np.concatenate([alive[:-1] - alive[1:], alive[-1] * have[seen:] / max(1, have[seen:].sum())])
    weights = share * len(lengths) / np.maximum(have, 1)
    return [weights[np.searchsorted(edges, one)] for one in kept]
