from copy import deepcopy
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from ebbtide.trainer.learning.learner import Learner, LearnerSettings
from ebbtide.trainer.learning.network import Network
from ebbtide.trainer.learning.sample_deal import minibatches
from ebbtide.trainer.learning.training_batches import TrainingSample, collate, micro_batches


def sample(length: int, sampled: int, *, advantage: float = 1.0, version: int = 3, seed: int = 0) -> TrainingSample:
    """Of the last `sampled` tokens the second was written by an environment."""
    rng = np.random.default_rng(seed * 1000 + length)
    mask = np.ones(sampled, dtype=np.bool_)
    mask[1:2] = False
    return TrainingSample(
        ids=rng.integers(5, 90, length),
        mask=mask,
        logprobs=np.where(mask, -2.0, np.nan).astype(np.float32),
        versions=np.full(sampled, version),
        advantage=advantage,
    )


def recorded(network: Network, one: TrainingSample, *, shift: float = 0.0) -> TrainingSample:
    """The sample with the logprobs that the network itself gives its tokens, plus `shift`."""
    with torch.no_grad():
        table = network(torch.from_numpy(one.ids)[None]).logits[0].log_softmax(-1)
    start = len(one.ids) - len(one.mask)
    own = [table[start + i - 1, one.ids[start + i]].item() for i in range(len(one.mask))]
    logprobs = np.where(one.mask, np.array(own) + shift, np.nan).astype(np.float32)
    return TrainingSample(one.ids, one.mask, logprobs, one.versions, one.advantage)


def test_padding_changes_no_logit_and_only_sampled_tokens_are_asked_for(network: Network) -> None:
    samples = [sample(9, 4), sample(20, 6), sample(5, 4)]
    batch = collate(samples)
    with torch.no_grad():
        logits = batch.logits(network)
        alone = [network(torch.from_numpy(one.ids)[None]).logits[0] for one in samples]
    row = 0
    for one, table in zip(samples, alone, strict=True):
        start = len(one.ids) - len(one.mask)
        for place in np.flatnonzero(one.mask):
            assert batch.targets[row] == one.ids[start + place]
            assert torch.allclose(logits[row], table[start + place - 1], atol=1e-4)
            row += 1
    assert row == len(logits) == len(batch.behaviour) == len(batch.advantages) == 11
    assert torch.isfinite(batch.behaviour).all()


def test_every_sample_is_in_one_minibatch_and_one_micro_batch_of_bounded_size() -> None:
    samples = [sample(length, 4) for length in (6, 30, 7, 31, 8, 9, 10)]
    parts = minibatches(samples, 3, Random(1))
    assert sorted(len(part) for part in parts) == [2, 2, 3]
    assert sorted(len(one.ids) for part in parts for one in part) == sorted(len(one.ids) for one in samples)
    shapes = [batch.ids.shape for batch in micro_batches(samples, 40)]
    assert sum(rows for rows, _ in shapes) == 7
    assert all(rows * length <= 40 for rows, length in shapes)
    assert [batch.ids.shape for batch in micro_batches(samples[:1], 1)] == [(1, 6)]


def weights(network: Network) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in network.parameters()]


def test_a_step_makes_good_responses_likelier_and_bad_ones_less_likely(network: Network) -> None:
    good = recorded(network, sample(12, 5, advantage=1.0))
    bad = recorded(network, sample(14, 5, advantage=-1.0))
    learner = Learner(network, LearnerSettings(learning_rate=1e-3), version=3)
    stats = learner.step([good, bad], Random(0))
    after_good, after_bad = recorded(network, good), recorded(network, bad)
    assert np.nansum(after_good.logprobs) > np.nansum(good.logprobs)
    assert np.nansum(after_bad.logprobs) < np.nansum(bad.logprobs)
    assert stats.logprob_gap == pytest.approx(0.0, abs=1e-5)
    assert (stats.tokens, stats.stale_tokens, stats.clip_share, stats.kl) == (8, 0, 0.0, 0.0)
    assert stats.importance_weight == pytest.approx(1.0)
    assert stats.entropy > 0


def test_micro_batches_do_not_change_the_step(network: Network) -> None:
    samples = [recorded(network, sample(10 + n, 5, advantage=(-1.0) ** n)) for n in range(6)]
    twin = Qwen3ForCausalLM(network.config)
    twin.load_state_dict(network.state_dict())
    for one, tokens in ((network, 16), (twin, 100_000)):
        settings = LearnerSettings(learning_rate=1e-3, minibatches=2, epochs=2, micro_batch_tokens=tokens)
        Learner(one, settings, version=3).step(samples, Random(0))
    for ours, theirs in zip(weights(network), weights(twin), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_advantages_of_zero_leave_the_weights_alone(network: Network) -> None:
    before = weights(network)
    stats = Learner(network, LearnerSettings(learning_rate=1e-2), version=3).step(
        [sample(12, 5, advantage=0.0)], Random(0)
    )
    assert stats.grad_norm == 0.0
    assert all(torch.equal(old, new) for old, new in zip(before, weights(network), strict=True))


def test_stale_tokens_are_weighed_by_drift_and_left_out_of_the_gap(network: Network) -> None:
    drifted = recorded(network, sample(12, 5, version=2), shift=-0.5)  # the network now finds them likelier
    far = recorded(network, sample(13, 5, version=1), shift=-3.0)
    fresh = recorded(network, sample(14, 5, version=3), shift=0.25)
    learner = Learner(network, LearnerSettings(learning_rate=1e-4, importance_cap=2.0), version=3)
    stats = learner.step([drifted, far, fresh], Random(0))
    assert stats.stale_tokens == 8
    assert stats.logprob_gap == pytest.approx(0.25, abs=1e-4)
    assert stats.importance_weight == pytest.approx((np.exp(0.5) + 2.0 + 1.0) / 3, abs=1e-3)
    alone = Learner(network, LearnerSettings(), version=9).step([drifted], Random(0))
    assert alone.logprob_gap is None


@pytest.mark.parametrize("updates", [1, 2])
def test_truncated_importance_sampling_weighs_fresh_tokens_by_mismatch_instead_of_clipping_them(
    network: Network, updates: int
) -> None:
    """The engine found some tokens less likely than the trainer does, by more than the clip bound."""
    off = recorded(network, sample(12, 5), shift=-0.5)
    far = recorded(network, sample(13, 5), shift=-3.0)
    by_clip, by_weight = (
        Learner(
            deepcopy(network),
            LearnerSettings(learning_rate=1e-6, epochs=updates, truncated_importance_sampling=truncated),
            version=3,
        ).step([off, far], Random(0))
        for truncated in (False, True)
    )
    assert (by_clip.clip_share, by_clip.importance_weight, by_clip.grad_norm) == (1.0, 1.0, 0.0)
    assert by_weight.clip_share == 0.0
    assert by_weight.importance_weight == pytest.approx((np.exp(0.5) + 2.0) / 2, abs=1e-3)
    assert by_weight.grad_norm > 0
    assert by_weight.logprob_gap == by_clip.logprob_gap == pytest.approx(1.75, abs=1e-3)


def test_the_kl_term_holds_the_policy_at_its_reference(network: Network) -> None:
    reference = Qwen3ForCausalLM(network.config)
    reference.load_state_dict(network.state_dict())
    samples = [recorded(network, sample(12, 5))]
    moved = {}
    for coefficient in (0.0, 50.0):
        twin = Qwen3ForCausalLM(network.config)
        twin.load_state_dict(network.state_dict())
        settings = LearnerSettings(learning_rate=1e-3, kl_coefficient=coefficient, epochs=20)
        stats = Learner(twin, settings, version=3, reference=reference).step(samples, Random(0))
        moved[coefficient] = np.nansum(recorded(twin, samples[0]).logprobs) - np.nansum(samples[0].logprobs)
        assert (stats.kl > 0) == (coefficient > 0)
    assert 0 < moved[50.0] < moved[0.0] / 2


def test_a_kl_term_does_not_change_how_much_a_token_teaches(network: Network) -> None:
    reference = Qwen3ForCausalLM(network.config)
    reference.load_state_dict(network.state_dict())
    teaching, idle = recorded(network, sample(12, 5)), recorded(network, sample(30, 9, advantage=0.0))
    norms = []
    # Without a KL term, the trainer leaves out what teaches nothing.
    for coefficient, samples in ((0.0, [teaching]), (1e-9, [teaching, idle])):
        twin = Qwen3ForCausalLM(network.config)
        twin.load_state_dict(network.state_dict())
        settings = LearnerSettings(kl_coefficient=coefficient)
        norms.append(Learner(twin, settings, version=3, reference=reference).step(samples, Random(0)).grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_a_restored_learner_goes_on_exactly(network: Network) -> None:
    samples = [recorded(network, sample(12, 5, advantage=1.0)), recorded(network, sample(13, 5, advantage=-1.0))]
    settings = LearnerSettings(learning_rate=1e-3, warmup_steps=3)
    learner = Learner(network, settings, version=3)
    first = learner.step(samples, Random(0))
    saved, state = {k: v.clone() for k, v in network.state_dict().items()}, deepcopy(learner.state_dict())
    twin = Qwen3ForCausalLM(network.config)
    twin.load_state_dict(saved)
    restored = Learner(twin, settings, version=3)
    restored.load_state_dict(state)
    second = learner.step(samples, Random(1))
    assert restored.step(samples, Random(1)) == second
    assert all(torch.equal(a, b) for a, b in zip(weights(network), weights(twin), strict=True))
    assert (first.learning_rate, second.learning_rate) == pytest.approx((0.25e-3, 0.5e-3))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")
def test_a_step_on_a_gpu_is_that_of_the_cpu(network: Network) -> None:
    samples = [recorded(network, sample(12, 5, advantage=1.0)), recorded(network, sample(13, 5, advantage=-1.0))]
    twin = deepcopy(network).to("cuda")
    settings = LearnerSettings(learning_rate=1e-3)
    here = Learner(network, settings, version=3).step(samples, Random(0))
    there = Learner(twin, settings, version=3).step(samples, Random(0))
    assert there.loss == pytest.approx(here.loss, abs=1e-4)
    assert there.grad_norm == pytest.approx(here.grad_norm, rel=1e-3)
    pairs = zip(weights(network), weights(twin), strict=True)
    assert all(torch.allclose(old, new.cpu(), atol=1e-3) for old, new in pairs)
