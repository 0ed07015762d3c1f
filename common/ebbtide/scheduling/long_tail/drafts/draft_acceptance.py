"""Learns how far drafts are accepted: the probability that at least k draft tokens are, for each k.

A draft that was accepted whole tells that its tokens were, and nothing of those that it did not have. So the shares are
learnt token by token, each among the drafts that had it and were accepted up to it, as in the product-limit estimate
(Kaplan and Meier, JASA 53, 1958). A group's shares start from those of all groups, since its siblings' drafts tell most
of a first sample's.

Invariant: `_tried` and `_accepted` count drafts by token, older ones fading. Lost with the process; some hundred steps
of an engine teach them again.
"""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Final

#: The longest draft: vLLM's bound for all methods is 128, and Seer's drafts have 8.
LONGEST_DRAFT: Final = 32
#: Until drafts tell, such a share of tokens is accepted, each after the one before it.
#: It weighs as much as so many drafts.
_PRIOR_SHARE, _PRIOR_DRAFTS = 0.6, 8.0
#: After so many drafts of a token its counts are halved.
_MEMORY: Final = 2_048.0


class DraftAcceptance:
    """`wider`: what stands for drafts until there are enough, as that of all groups for one group."""

    def __init__(self, wider: "DraftAcceptance | None" = None) -> None:
        self._wider = wider
        self._tried = [0.0] * LONGEST_DRAFT
        self._accepted = [0.0] * LONGEST_DRAFT

    def observe(self, drafted: int, accepted: int) -> None:
        """Note a draft of so many tokens, of which the first `accepted` were."""
        drafted = min(drafted, LONGEST_DRAFT)
        accepted = min(max(accepted, 0), drafted)
        for token in range(min(accepted + 1, drafted)):
            if self._tried[token] >= _MEMORY:
                self._tried[token] *= 0.5
                self._accepted[token] *= 0.5
            self._tried[token] += 1.0
            self._accepted[token] += 1.0 if token < accepted else 0.0

    def survival(self, longest: int) -> list[float]:
        """Probabilities that at least 1, 2, ... `longest` tokens of a draft are accepted. They never rise."""
        return list(accumulate(self.shares(min(longest, LONGEST_DRAFT)), mul))

    def shares(self, longest: int) -> Sequence[float]:
        """Probabilities that each of the first tokens is accepted, if all before it are."""
        prior = [_PRIOR_SHARE] * longest if self._wider is None else self._wider.shares(longest)
        return [
            (accepted + _PRIOR_DRAFTS * share) / (tried + _PRIOR_DRAFTS)
            for accepted, tried, share in zip(self._accepted, self._tried, prior, strict=False)
        ]
