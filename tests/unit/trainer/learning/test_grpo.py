import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ebbtide.errors import InvalidRequest
from ebbtide.trainer.learning.grpo import (
    StepStats,
    StepSums,
    at_tokens,
    group_advantages,
    permute_within_groups,
    policy_loss,
    sampling_logprobs,
    truncated_support,
)


def logits_of(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities]).log()


def token_logprobs(logits: Tensor, tokens: Tensor, **sampling: Any) -> tuple[Tensor, Tensor]:
    return at_tokens(sampling_logprobs(logits, tokens, **sampling), tokens)


def test_advantages_are_normalised_within_each_group() -> None:
    rewards = torch.tensor([1.0, 5.0, 0.0, 1.0, 0.0, 5.0])
    groups = torch.tensor([0, 1, 0, 0, 0, 1])
    root = math.sqrt(3)
    assert torch.allclose(group_advantages(rewards, groups), torch.tensor([1 / 1, 0.0, -1.0, 1.0, -1.0, 0.0]))
    rewards[3] = 0.0
    expected = torch.tensor([root, 0.0, -1 / root, -1 / root, -1 / root, 0.0])
    assert torch.allclose(group_advantages(rewards, groups), expected)
    assert torch.allclose(
        group_advantages(rewards, groups, normalize_std=False), torch.tensor([0.75, 0, -0.25, -0.25, -0.25, 0])
    )


@pytest.mark.parametrize("normalize_std", [True, False])
def test_a_group_of_equal_rewards_teaches_exactly_nothing(normalize_std: bool) -> None:
    rewards = torch.full((7,), 0.1)  # its mean is off by a rounding error
    advantages = group_advantages(rewards, torch.tensor([0] * 6 + [1]), normalize_std=normalize_std)
    assert advantages.tolist() == [0.0] * 7


def test_permuted_rewards_stay_in_their_group_and_depend_on_its_generator_alone() -> None:
    rewards = torch.arange(40.0)
    groups = torch.arange(40) % 4

    def permuted(*seeds: int) -> Tensor:
        return permute_within_groups(rewards, groups, [torch.Generator().manual_seed(seed) for seed in seeds])

    first = permuted(1, 2, 3, 4)
    assert torch.equal(first, permuted(1, 2, 3, 4))
    assert not torch.equal(first, rewards)
    for group in range(4):
        assert torch.equal(first[groups == group].sort().values, rewards[groups == group])
    changed = first != permuted(1, 2, 9, 4)
    assert set(groups[changed].tolist()) == {2}


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    logits = logits_of(0.1, 0.5, 0.3, 0.1)
    first = torch.tensor([1])
    assert truncated_support(logits, first, top_p=0.7).tolist() == [[False, True, True, False]]
    assert truncated_support(logits, first, top_p=0.4).tolist() == [[False, True, False, False]]
    assert truncated_support(logits, first, top_p=1e-6).tolist() == [[False, True, False, False]]


def test_top_k_keeps_ties_and_comes_before_top_p() -> None:
    token = torch.tensor([0])
    assert truncated_support(logits_of(0.4, 0.2, 0.2, 0.2), token, top_k=2).all()
    # Of the two largest alone the first has 0.4 / 0.7 > 0.55: top-p sees renormalised probabilities.
    both = truncated_support(logits_of(0.4, 0.3, 0.2, 0.1), token, top_k=2, top_p=0.55)
    assert both.tolist() == [[True, False, False, False]]


def test_the_sampled_token_always_stays_in_the_support() -> None:
    logits = logits_of(0.9, 0.08, 0.02)
    assert truncated_support(logits, torch.tensor([2]), top_p=0.5, top_k=1).tolist() == [[True, False, True]]
    logprob, _ = token_logprobs(logits, torch.tensor([2]), top_k=1)
    assert logprob.exp().item() == pytest.approx(0.02 / 0.92)


def test_the_truncation_is_that_of_vllm() -> None:
    sampler = pytest.importorskip("vllm.v1.sample.ops.topk_topp_sampler")
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(0)) * 3
    for top_p, top_k in ((0.9, 0), (0.3, 0), (1.0, 7), (0.8, 12)):
        k = torch.full((64,), top_k) if top_k else None
        p = torch.full((64,), top_p) if top_p < 1 else None
        theirs = sampler.apply_top_k_top_p_pytorch(logits.clone(), k, p).isfinite()
        ours = truncated_support(logits, logits.argmax(-1), top_p=top_p, top_k=top_k)
        assert torch.equal(ours, theirs)


def test_logprobs_and_entropy_are_those_of_the_distribution_sampled_from() -> None:
    logits = logits_of(0.5, 0.25, 0.25)
    logprob, entropy = token_logprobs(logits, torch.tensor([1]))
    assert logprob.item() == pytest.approx(math.log(0.25))
    assert entropy.item() == pytest.approx(1.5 * math.log(2))
    squared, _ = token_logprobs(logits, torch.tensor([1]), temperature=0.5)
    assert squared.exp().item() == pytest.approx(0.0625 / 0.375)
    _, cut = token_logprobs(logits_of(0.5, 0.3, 0.2), torch.tensor([0]), top_k=1)
    assert cut.item() == 0.0


def test_the_gradient_is_finite_and_stays_inside_the_truncated_support() -> None:
    logits = logits_of(0.4, 0.3, 0.2, 0.1).requires_grad_()
    logprob, _ = token_logprobs(logits, torch.tensor([0]), top_p=0.6)
    logprob.sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert torch.allclose(logits.grad, torch.tensor([[3 / 7, -3 / 7, 0.0, 0.0]]))


def test_the_mismatch_of_fresh_tokens_is_summed_over_ranks_into_mean_percentile_and_kl() -> None:
    generator = torch.Generator().manual_seed(0)
    gaps = torch.randn(10_000, generator=generator) * 0.02
    gaps[:150] = 3.0
    parts = [StepSums(), StepSums()]
    for part, some in zip(parts, (gaps[:7_000], gaps[7_000:]), strict=True):
        part.passes, part.updates = len(some), 1
        part.add_gaps(some[:3_000])
        part.add_gaps(some[3_000:])
    others = iter([parts[1]])

    def add_up(values: Sequence[float]) -> list[float]:
        other = next(others)
        counts = [float(other.passes), float(other.gap_tokens), *other.values.values(), *other.gap_bins]
        return [one + more for one, more in zip(values, counts, strict=True)]

    stats = parts[0].over_ranks(add_up).into(StepStats(tokens=10_000, stale_tokens=0, learning_rate=1.0))
    assert stats.logprob_gap == pytest.approx(gaps.abs().mean().item(), rel=1e-4)
    assert stats.logprob_gap_p99 is not None
    exact = gaps.abs().quantile(0.99).item()
    assert exact <= stats.logprob_gap_p99 <= 1.08 * exact
    assert stats.logprob_gap_kl == pytest.approx((gaps.exp() - 1 - gaps).mean().item(), rel=1e-4)
    nothing = StepSums(passes=1, updates=1).into(StepStats(tokens=1, stale_tokens=1, learning_rate=1.0))
    assert (nothing.logprob_gap, nothing.logprob_gap_p99, nothing.logprob_gap_kl) == (None, None, None)


def test_one_token_that_the_engine_found_impossible_leaves_the_mismatch_finite() -> None:
    sums = StepSums(passes=2, updates=1)
    sums.add_gaps(torch.tensor([300.0, -300.0]))
    stats = sums.into(StepStats(tokens=2, stale_tokens=0, learning_rate=1.0))
    assert stats.logprob_gap == 300.0
    assert all(math.isfinite(one) for one in (stats.logprob_gap_p99 or math.inf, stats.logprob_gap_kl or math.inf))


def test_greedy_responses_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="temperature"):
        token_logprobs(logits_of(0.5, 0.5), torch.tensor([0]), temperature=0.0)


def test_the_ratio_is_clipped_only_where_it_would_go_on_growing() -> None:
    behaviour = torch.zeros(4)
    logprobs = torch.tensor([1.5, 1.5, 0.5, 0.5]).log().requires_grad_()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    parts = policy_loss(logprobs, behaviour, advantages, normalizer=4, clip_low=0.2, clip_high=0.3)
    assert parts.loss.item() == pytest.approx((-1.3 + 1.5 - 0.5 + 0.8) / 4)
    assert (parts.clipped, parts.tokens, parts.weight) == (2.0, 4, 4.0)
    parts.loss.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    assert torch.allclose(logprobs.grad, torch.tensor([0.0, 1.5, -0.5, 0.0]) / 4)


def test_on_policy_the_gradient_is_that_of_reinforce() -> None:
    logprobs = torch.tensor([-1.0, -2.0]).requires_grad_()
    policy_loss(logprobs, logprobs.detach(), torch.tensor([2.0, -3.0]), normalizer=2).loss.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-1.0, 1.5]


def test_stale_tokens_are_weighed_by_their_drift_up_to_the_cap() -> None:
    behaviour = torch.tensor([0.25, 0.25, 0.5]).log()
    proximal = torch.tensor([0.375, 0.75, 0.5]).log()  # drifted by 1.5, drifted by 3, fresh
    logprobs = proximal.clone().requires_grad_()
    parts = policy_loss(logprobs, behaviour, torch.ones(3), normalizer=1, proximal=proximal, importance_cap=2.0)
    assert parts.loss.item() == pytest.approx(-(1.5 + 2.0 + 1.0))
    assert parts.weight == pytest.approx(4.5)
    parts.loss.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    assert torch.allclose(logprobs.grad, -torch.tensor([1.5, 2.0, 1.0]))


def test_the_kl_term_is_zero_at_the_reference_and_pulls_back_to_it() -> None:
    reference = torch.tensor([-1.0, -2.0])
    zero = torch.zeros(2)
    at = policy_loss(reference, reference, zero, normalizer=2, reference=reference, kl_coefficient=0.5)
    assert (at.loss.item(), at.kl) == (0.0, 0.0)
    away = (reference + torch.tensor([math.log(2), 0.0])).requires_grad_()
    parts = policy_loss(away, away.detach(), zero, normalizer=2, reference=reference, kl_coefficient=0.5)
    assert parts.kl == pytest.approx(0.5 + math.log(2) - 1)
    assert parts.loss.item() == pytest.approx(0.25 * parts.kl)
    parts.loss.backward()  # type: ignore[no-untyped-call]
    assert away.grad is not None
    assert away.grad.tolist() == pytest.approx([0.125, 0.0])


def test_the_sum_over_micro_batches_is_the_whole() -> None:
    generator = torch.Generator().manual_seed(3)
    now, then, advantage = (torch.randn(10, generator=generator) for _ in range(3))
    whole = policy_loss(now, then, advantage, normalizer=10)
    parts = [policy_loss(now[s], then[s], advantage[s], normalizer=10) for s in (slice(0, 3), slice(3, 10))]
    assert sum(part.loss.item() for part in parts) == pytest.approx(whole.loss.item())
    assert sum(part.clipped for part in parts) == whole.clipped
