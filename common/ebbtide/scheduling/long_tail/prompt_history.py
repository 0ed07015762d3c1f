"""Remembers how long the responses of each prompt were in former epochs, and says what to expect of the next ones.

A group's shared part (`shared_part`) is taken as the sum of a part that lasts over epochs and one that is new in each.
How much lasts is learnt from prompts that came again. All parts are scores against the lengths of their own step, so a
policy whose responses grow does not make old lengths misleading.

Invariant: `_known` has the newest shared parts of the prompts that came last, with the variance of each estimate. Lost
with the process; an epoch teaches it again, and meanwhile prompts count as new.
"""

from typing import Final

from ebbtide.scheduling.long_tail.shared_part import SharedPrior

#: Epochs of a prompt that count.
_EPOCHS: Final = 3
#: Prompts that are remembered: with some 300 bytes each, 20 MB.
_PROMPTS: Final = 65_536
#: Share of the shared variance that lasts, until pairs of epochs tell: they weigh as much as this after so many.
_LASTING: Final = 0.5
_PRIOR_PAIRS: Final = 16.0
#: After so many pairs, all weights are halved.
_PAIRS: Final = 4_096.0
#: At least this share of the variance is new in each epoch: no estimate is sure enough for less.
_NEW: Final = 0.02


class PromptHistory:
    def __init__(self) -> None:
        self._known: dict[str, tuple[tuple[float, float], ...]] = {}
        self._products = self._pairs = 0.0  # of shared parts of one prompt in two epochs, by the shared variance

    @property
    def lasting(self) -> float:
        """Share of the shared variance that a prompt keeps from epoch to epoch."""
        found = (self._products + _PRIOR_PAIRS * _LASTING) / (self._pairs + _PRIOR_PAIRS)
        return min(max(found, 0.0), 1.0 - _NEW)

    def prior(self, prompt: str, variance: float) -> SharedPrior:
        """What to expect of a group's shared part. `variance`: of shared parts of all prompts. "": no known prompt."""
        epochs, lasting = self._known.get(prompt, ()), self.lasting * variance
        if not epochs or lasting <= 0.0:
            return SharedPrior(0.0, variance)
        new = variance - lasting
        precision, pull = 1.0 / lasting, 0.0
        for mean, noise in epochs:
            weight = 1.0 / (new + noise)
            precision += weight
            pull += weight * mean
        return SharedPrior(pull / precision, 1.0 / precision + new)

    def ended(self, prompt: str, variance: float, mean: float, noise: float) -> None:
        """Note the shared part of a group that ended: an estimate that is free of priors, and its variance."""
        if not prompt:
            return
        epochs = self._known.pop(prompt, ())
        if epochs:
            self._products += mean * epochs[-1][0] / variance
            self._pairs += 1.0
            if self._pairs > _PAIRS:
                self._products, self._pairs = 0.5 * self._products, 0.5 * self._pairs
        self._known[prompt] = (*epochs, (mean, noise))[-_EPOCHS:]  # the last one in the order of the dictionary
        if len(self._known) > _PROMPTS:
            del self._known[next(iter(self._known))]
