"""Sums what the passes of a step measure, and averages it for the step's event."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

#: Values that are summed over a step's tokens or updates, and over ranks.
_SUMMED: Final = ("loss", "entropy", "clipped", "kl", "weight", "gap")


@dataclass
class StepStats:
    """Means over a step's sampled tokens and epochs."""

    tokens: int  # counted once
    stale_tokens: int  # counted once
    learning_rate: float
    loss: float = 0.0
    entropy: float = 0.0
    kl: float = 0.0
    clip_share: float = 0.0
    importance_weight: float = 0.0
    grad_norm: float = 0.0  # mean over updates, before clipping
    #: mean absolute difference to the workers' logprobs, on tokens of the trainer's version, before the first update
    logprob_gap: float | None = None


@dataclass
class StepSums:
    """Sums over the passes of one rank."""

    passes: int = 0
    updates: int = 0
    gap_tokens: int = 0
    norm: float = 0.0
    values: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_SUMMED, 0.0))

    def add(self, **values: float) -> None:
        for name, value in values.items():
            self.values[name] += value

    def over_ranks(self, add_up: Callable[[Sequence[float]], list[float]]) -> "StepSums":
        """Sums over all ranks, except updates and gradient norms, which all ranks share."""
        passes, gap_tokens, *rest = add_up([float(self.passes), float(self.gap_tokens), *self.values.values()])
        named = dict(zip(self.values, rest, strict=True))
        return StepSums(int(passes), self.updates, int(gap_tokens), self.norm, named)

    def into(self, stats: StepStats) -> StepStats:
        """Fills in the means."""
        values = self.values
        stats.loss, stats.grad_norm = values["loss"] / self.updates, self.norm / self.updates
        stats.entropy, stats.kl = values["entropy"] / self.passes, values["kl"] / self.passes
        stats.clip_share, stats.importance_weight = values["clipped"] / self.passes, values["weight"] / self.passes
        stats.logprob_gap = values["gap"] / self.gap_tokens if self.gap_tokens else None
        return stats
