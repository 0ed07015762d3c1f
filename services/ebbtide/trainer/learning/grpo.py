"""Implements GRPO in pure functions over tensors: advantages, token logprobs, loss.

Tensors of shape (n,) run over the sampled tokens of a minibatch, flattened; tokens of prompts and environments are left
out before (`ebbtide.trainer.learning.training_batches`), so no mask is needed. Logprobs are in nats, float32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from ebbtide.errors import InvalidRequest


def group_advantages(rewards: Tensor, groups: Tensor, *, normalize_std: bool = True) -> Tensor:
    """Returns each sample's advantage over its group, (b,) float32. `rewards` (b,) float; `groups` (b,) int64, from 0.

    Reward less the group's mean, over the group's standard deviation (GRPO: DeepSeekMath, arXiv 2402.03300, section
    4.1.2); `normalize_std=False` leaves the division out (Dr. GRPO, arXiv 2503.20783, section 3.2). A group whose
    rewards are all equal teaches nothing: its advantages are exactly 0.
    """
    count = int(groups.max()) + 1 if groups.numel() else 0
    exact = rewards.double()
    sizes = torch.bincount(groups, minlength=count).clamp_min(1)
    centred = exact - (torch.zeros(count, dtype=torch.float64).index_add(0, groups, exact) / sizes)[groups]
    highest = torch.full((count,), -torch.inf, dtype=torch.float64).scatter_reduce(0, groups, exact, "amax")
    lowest = torch.full((count,), torch.inf, dtype=torch.float64).scatter_reduce(0, groups, exact, "amin")
    if normalize_std:
        variance = torch.zeros(count, dtype=torch.float64).index_add(0, groups, centred.square()) / sizes
        centred = centred / variance.sqrt()[groups]
    return torch.where((highest > lowest)[groups], centred, 0.0).float()


def permute_within_groups(rewards: Tensor, groups: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """Permutes the rewards within each group at random, as a control experiment. Each group has a generator."""
    permuted = rewards.clone()
    for group, generator in enumerate(generators):
        members = (groups == group).nonzero()[:, 0]
        permuted[members] = rewards[members[torch.randperm(len(members), generator=generator)]]
    return permuted


def truncated_support(
    logits: Tensor, tokens: Tensor, *, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0
) -> Tensor:
    """Returns which entries of `logits` (n, v), already divided by the temperature, could be sampled; (n, v) bool.

    vLLM's rule: of those at least `min_p` times as probable as the likeliest, and of these the k largest (ties with
    the k-th stay), the fewest whose renormalised probabilities reach `top_p`, at least one. It is applied to the
    trainer's own logits, which differ from the worker's by rounding (or by an update), so an entry at the edge may fall
    on the other side; `tokens` (n,), which were in fact sampled, always stay.
    """
    keep = torch.ones_like(logits, dtype=torch.bool)
    logits = logits.detach()
    if min_p > 0:
        probable = logits.softmax(-1)
        keep &= probable >= min_p * probable.amax(-1, keepdim=True)
        logits = logits.masked_fill(~keep, -torch.inf)
    if 0 < top_k < logits.shape[1]:
        keep &= logits >= logits.topk(top_k).values[:, -1:]
    if top_p < 1.0:
        ordered, order = logits.masked_fill(~keep, -torch.inf).sort(dim=-1)
        outside = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
        outside[:, -1] = False
        keep &= ~outside.gather(1, order.argsort(-1))
    return keep.scatter(1, tokens[:, None], value=True)


def sampling_logprobs(
    logits: Tensor,
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    barred: Tensor | None = None,
    early: Tensor | None = None,
) -> Tensor:
    """Returns the logprobs of all tokens under the distributions that `tokens` were sampled from, (n, v) float32.

    `logits` (n, v) in any float dtype, `tokens` (n,) int64. `early` (n,) bool says where the ids in `barred` (e,)
    int64, each given once, could not be sampled; where one was sampled all the same, none counts as barred. The
    gradient flows through the logits inside the truncated support, which itself is constant. Raises `InvalidRequest`
    for a temperature of 0, at which nothing is sampled.
    """
    if temperature <= 0:
        raise InvalidRequest("must be above 0: greedy responses cannot be trained on", field="sampling.temperature")
    scaled = logits.float() / temperature if temperature != 1 else logits.float()
    if barred is not None and early is not None:
        rows = early & ~torch.isin(tokens, barred)
        scaled = scaled.index_copy(1, barred, scaled[:, barred].masked_fill(rows[:, None], -torch.inf))
    if top_p < 1.0 or top_k > 0 or min_p > 0:
        support = truncated_support(scaled, tokens, top_p=top_p, top_k=top_k, min_p=min_p)
        scaled = scaled.masked_fill(~support, -torch.inf)
    return scaled.log_softmax(-1)


def at_tokens(logprobs: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each token's logprob, and its distribution's entropy without a gradient; both (n,). `logprobs` (n, v)."""
    with torch.no_grad():
        entropy = torch.special.entr(logprobs.exp()).sum(-1)
    return logprobs.gather(1, tokens[:, None])[:, 0], entropy


@dataclass(frozen=True)
class LossParts:
    """`loss` has the gradient; the rest are sums over the (n,) tokens given, so that micro-batches add up."""

    loss: Tensor
    tokens: int
    clipped: float
    kl: float
    weight: float


def policy_loss(
    logprobs: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    *,
    normalizer: float,
    kl_normalizer: float | None = None,
    proximal: Tensor | None = None,
    reference: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    importance_cap: float = 2.0,
    kl_coefficient: float = 0.0,
) -> LossParts:
    """Returns the clipped policy-gradient loss of tokens, all (n,): present `logprobs` (with gradient), the worker's
    recorded `behaviour`, and each token's advantage.

    The ratio is taken to `behaviour`. Tokens of an older version than the trainer's have drifted already: for these
    `proximal` holds the trainer's own logprobs from before the step (and `behaviour` for the others), the ratio is
    taken to it, and the token weighs min(exp(proximal - behaviour), importance_cap): truncated importance sampling
    (IMPALA, arXiv 1802.01561, section 4.1), with the two roles apart as in decoupled PPO (arXiv 2110.00641, section 3).
    `proximal` may hold the trainer's logprobs of the other tokens, too: these then weigh by how far the trainer is from
    the engine with the same weights (Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training", 2025). Clip bounds may differ (DAPO, arXiv 2503.14476, section 3.1).

    Every token counts alike: the sum is divided by `normalizer`, the minibatch's sampled tokens with an advantage other
    than 0 (DAPO, sections 3.2 and 3.3), not per response first as in GRPO, which favours short right and long wrong
    responses (Dr. GRPO, section 3.1).

    `kl_coefficient` adds the k3 estimate of KL(now || reference), exp(d) - d - 1 with d = reference - now (GRPO, eq.
    4). Its sum is divided by `kl_normalizer`, all sampled tokens of the minibatch (None: `normalizer`), so the term
    does not change what a token's advantage weighs.
    """
    anchor = behaviour if proximal is None else proximal
    weight = (anchor - behaviour).exp().clamp_max(importance_cap)
    ratio = (logprobs - anchor).exp()
    plain, bounded = ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss = -(weight * torch.minimum(plain, bounded)).sum() / normalizer
    kl = torch.zeros(())
    if reference is not None:
        gap = reference - logprobs
        kl = (gap.exp() - gap - 1).sum()
        loss = loss + kl_coefficient * kl / (kl_normalizer or normalizer)
    return LossParts(
        loss=loss,
        tokens=logprobs.numel(),
        clipped=float((bounded < plain).sum()),
        kl=kl.item(),
        weight=weight.sum().item(),
    )


#: Values that are summed over a step's tokens or updates, and over ranks.
_SUMMED: Final = ("loss", "entropy", "clipped", "kl", "weight", "gap", "gap_kl")
#: Absolute logprob differences are counted in bins of equal ratio, 7.5 % wide: so many to a decade, from 1e-7 nats to
#: 100. A percentile of all ranks then follows from sums.
_BINS_OF_DECADE, _LEAST_GAP, _DECADES = 32, 1e-7, 9
_BINS: Final = _BINS_OF_DECADE * _DECADES
#: Largest logprob difference in the KL estimate, in nats, so that a single token leaves it finite.
_MOST_GAP: Final = 20.0


def percentile_of_gaps(counts: Sequence[float], share: float) -> float:
    """The difference, in nats, that a `share` of those counted do not exceed, rounded up to the end of its bin."""
    wanted, seen = share * sum(counts), 0.0
    for number, count in enumerate(counts):
        seen += count
        if seen >= wanted:
            return float(_LEAST_GAP * 10 ** ((number + 1) / _BINS_OF_DECADE))
    raise ValueError("nothing was counted")


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
    # Of the differences to the workers' logprobs, on tokens of the trainer's version, before the first update: the mean
    # and 99th percentile of their absolute values, and the KL from the workers' distribution to the trainer's.
    logprob_gap: float | None = None
    logprob_gap_p99: float | None = None
    logprob_gap_kl: float | None = None


@dataclass
class StepSums:
    """Sums over the passes of one rank."""

    passes: int = 0
    updates: int = 0
    gap_tokens: int = 0
    norm: float = 0.0
    values: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_SUMMED, 0.0))
    gap_bins: list[float] = field(default_factory=lambda: [0.0] * _BINS)

    def add(self, **values: float) -> None:
        for name, value in values.items():
            self.values[name] += value

    def add_gaps(self, differences: Tensor) -> None:
        """Adds logprobs under the trainer less those under the workers, (n,), of tokens of the trainer's version.

        The KL is the k3 estimate over tokens that the workers sampled, exp(d) - 1 - d: it is never below 0, and varies
        less than the mean of -d (Schulman, "Approximating KL Divergence", 2020).
        """
        sizes = differences.abs()
        places = ((sizes.clamp_min(_LEAST_GAP) / _LEAST_GAP).log10() * _BINS_OF_DECADE).long().clamp(0, _BINS - 1)
        bounded = differences.clamp_max(_MOST_GAP)
        self.add(gap=sizes.sum().item(), gap_kl=(bounded.exp() - 1 - bounded).sum().item())
        self.gap_tokens += len(differences)
        counts = places.bincount(minlength=_BINS).tolist()
        self.gap_bins = [one + more for one, more in zip(self.gap_bins, counts, strict=True)]

    def over_ranks(self, add_up: Callable[[Sequence[float]], list[float]]) -> "StepSums":
        """Sums over all ranks, except updates and gradient norms, which all ranks share."""
        counts = [float(self.passes), float(self.gap_tokens)]
        passes, gap_tokens, *rest = add_up([*counts, *self.values.values(), *self.gap_bins])
        named = dict(zip(self.values, rest[: len(self.values)], strict=True))
        bins = rest[len(self.values) :]
        return StepSums(int(passes), self.updates, int(gap_tokens), self.norm, named, bins)

    def into(self, stats: StepStats) -> StepStats:
        """Fills in the means."""
        values = self.values
        stats.loss, stats.grad_norm = values["loss"] / self.updates, self.norm / self.updates
        stats.entropy, stats.kl = values["entropy"] / self.passes, values["kl"] / self.passes
        stats.clip_share, stats.importance_weight = values["clipped"] / self.passes, values["weight"] / self.passes
        if self.gap_tokens:
            stats.logprob_gap = values["gap"] / self.gap_tokens
            stats.logprob_gap_p99 = percentile_of_gaps(self.gap_bins, 0.99)
            stats.logprob_gap_kl = values["gap_kl"] / self.gap_tokens
        return stats
