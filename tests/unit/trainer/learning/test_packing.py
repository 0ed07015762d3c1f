"""Packed rows: no sample sees another, and a step learns what it learns from padded rows, with and without activations
that are computed again."""

from copy import deepcopy
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ebbtide.errors import InvalidRequest
from ebbtide.trainer.learning.learner import Learner, LearnerSettings
from ebbtide.trainer.learning.network import Network, checkpoint_layers
from ebbtide.trainer.learning.packed_attention import has_kernel, packs
from ebbtide.trainer.learning.sample_deal import micro_parts
from ebbtide.trainer.learning.sampled_logprobs import SampledLogprobs
from ebbtide.trainer.learning.training_batches import TrainingSample, collate, pack
from tests.unit.trainer.learning.tiny_networks import (
    SAMPLES,
    TOLERANCE,
    VOCABULARY,
    distance,
    gradients,
    make_network,
    make_sample,
    plainly,
    sampled_in_turns,
)

#: "window": layers that see the 6 newest tokens alternate with those that see all.
NETWORKS = ["qwen3", "qwen3 tied", "llama", "llama tied", "cohere", "window"]


def network_of(name: str) -> Network:
    if name != "window":
        return make_network(name)
    network = make_network("qwen3")
    network.config.layer_types = ["sliding_attention", "full_attention"]
    twin = type(network)(network.config)
    twin.config.sliding_window = 6
    twin.model.layers[0].self_attn.sliding_window = 6
    twin.load_state_dict(network.state_dict())
    return twin.eval()


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_packed_rows_give_the_logprobs_and_gradients_of_padded_ones(name: str, again: bool) -> None:
    network = network_of(name)
    padded = SampledLogprobs(network, dtype=torch.float32, whole=True).use()
    expected, expected_entropy = padded(padded.collate(SAMPLES), [plainly])
    wanted = gradients(network, expected)
    assert packs(network)
    assert not again or checkpoint_layers(network)
    packed = SampledLogprobs(network, dtype=torch.float32, packed=True, chunk_logits=5 * VOCABULARY).use()
    batch = packed.collate(SAMPLES)
    assert batch.ids.shape == (1, sum(one.length for one in SAMPLES))
    found, entropy = packed(batch, [plainly])
    assert torch.allclose(found, expected, atol=1e-5)
    assert torch.allclose(entropy, expected_entropy, atol=1e-5)
    assert distance(gradients(network, found), wanted) < TOLERANCE


def test_no_sample_sees_another() -> None:
    network = make_network("llama")
    packed = SampledLogprobs(network, dtype=torch.float32, packed=True).use()
    first, second, third = SAMPLES
    changed = replace(second, ids=np.roll(second.ids, 1))
    with torch.no_grad():
        before, _ = packed(pack([first, second, third]), [plainly])
        after, _ = packed(pack([first, changed, third]), [plainly])
    begin, end = first.sampled, first.sampled + second.sampled
    assert torch.equal(before[:begin], after[:begin])
    assert torch.equal(before[end:], after[end:])
    assert not torch.allclose(before[begin:end], after[begin:end])


def test_a_network_that_carries_a_state_along_a_row_or_changes_scores_is_not_packed() -> None:
    assert not packs(make_network("gemma2")), "its scores are capped"
    network = make_network("qwen3")
    network.config.layer_types = ["linear_attention", "full_attention"]
    assert not packs(network)
    stateful = make_network("llama")
    stateful._is_stateful = True
    assert not packs(stateful)
    learner = Learner(make_network("gemma2"), LearnerSettings(packing=True), version=3)
    assert not learner.packed


def test_attention_over_packed_rows_refuses_a_network_that_drops_the_bounds() -> None:
    network = make_network("llama")
    SampledLogprobs(network, dtype=torch.float32, packed=True).use()
    with pytest.raises(InvalidRequest, match="packing"):
        network(input_ids=torch.ones((1, 4), dtype=torch.int64), use_cache=False)


def test_micro_batches_without_padding_are_as_full_as_first_fit_makes_them() -> None:
    samples = [make_sample(length, 3) for length in (4, 9, 6, 4, 20, 6, 4)]
    parts = list(micro_parts(samples, 10, packed=True))
    assert sorted(one.length for part in parts for one in part) == sorted(one.length for one in samples)
    sizes = [sum(one.length for one in part) for part in parts]
    assert all(size <= 10 or len(part) == 1 for size, part in zip(sizes, parts, strict=True))
    assert sorted(sizes) == [4, 9, 10, 10, 20]
    assert len(list(micro_parts(samples, 10))) == 6


STEPS: list[dict[str, Any]] = [{}, {"kl_coefficient": 0.2}, {"minibatches": 2, "epochs": 2}]


def learnt(
    network: Network, settings: dict[str, Any], *, elements: int, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, Any], list[Tensor]]:
    """What a step on chunks of so many logits reports, and its weights."""
    monkeypatch.setattr("ebbtide.trainer.learning.learner.CHUNK_LOGITS", elements)
    reference = make_network("qwen3") if settings.get("kl_coefficient") else None
    learner = Learner(network, LearnerSettings(learning_rate=1e-3, **settings), version=3, reference=reference)
    samples = [*sampled_in_turns(SAMPLES), *map(stale, SAMPLES)]
    if streamed:
        for part in (samples[:2], samples[2:]):
            learner.accumulate(part)
        return vars(learner.update()), list(network.parameters())
    return vars(learner.step(samples, Random(0))), list(network.parameters())


def stale(one: TrainingSample) -> TrainingSample:
    return replace(one, ids=one.ids[::-1].copy(), versions=one.versions - 1, advantage=-0.7)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("settings", STEPS)
def test_a_step_on_chunks_packed_and_computed_again_is_the_plain_step(
    settings: dict[str, Any], streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = make_network("qwen3")
    if streamed and settings:
        pytest.skip("a streamed step has one update and no KL term")
    twin = deepcopy(network)
    plain, weights = learnt(network, settings, elements=1 << 26, streamed=streamed, monkeypatch=monkeypatch)
    assert checkpoint_layers(twin)
    lean = {"packing": True, "micro_batch_tokens": 60}
    found, own = learnt(twin, settings | lean, elements=4 * VOCABULARY, streamed=streamed, monkeypatch=monkeypatch)
    assert found == pytest.approx(plain, rel=1e-4, abs=1e-5)
    for ours, theirs in zip(own, weights, strict=True):
        assert torch.allclose(ours, theirs, atol=2e-5)


def test_layers_are_computed_again_with_everything_inside_them_in_evaluation_mode() -> None:
    network = make_network("llama")
    assert checkpoint_layers(network)
    layers = list(network.model.layers)
    calls = [0, 0]
    for number, layer in enumerate(layers):
        assert layer.training
        assert not any(module.training for module in layer.modules() if module is not layer)
        layer.mlp.register_forward_pre_hook(lambda *_, number=number: calls.__setitem__(number, calls[number] + 1))
    packed = SampledLogprobs(network, dtype=torch.float32).use()
    found, _ = packed(collate(SAMPLES), [plainly])
    assert calls == [1, 1]
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert calls == [2, 2]


@pytest.mark.skipif(not has_kernel("cuda" if torch.cuda.is_available() else "cpu"), reason="no GPU with the kernel")
def test_the_kernel_of_a_gpu_computes_what_each_sample_alone_does_within_bfloat16() -> None:
    network = make_network("qwen3").to("cuda")
    exact = SampledLogprobs(network, dtype=torch.float32, whole=True).use()
    wanted = gradients(network, exact(exact.collate(SAMPLES), [plainly])[0].cpu())
    packed = SampledLogprobs(network, dtype=torch.bfloat16, packed=True).use()
    found, _ = packed(packed.collate(SAMPLES), [plainly])
    assert distance(gradients(network, found.cpu()), wanted) < 0.1
