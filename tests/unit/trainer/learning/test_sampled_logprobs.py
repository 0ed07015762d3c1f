"""What is computed from chunks of logits equals what a network's own code computes of all logits at once."""

from copy import deepcopy
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ebbtide.trainer.learning.grpo import sampling_logprobs
from ebbtide.trainer.learning.learner import Learner, LearnerSettings
from ebbtide.trainer.learning.network import Network
from ebbtide.trainer.learning.sampled_logprobs import SampledLogprobs, agreeing_logprobs
from ebbtide.trainer.learning.training_batches import collate
from tests.unit.trainer.learning.tiny_networks import (
    ARCHITECTURES,
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


def cut(logits: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
    barred = torch.tensor([2, 7])
    early = positions < 3
    return sampling_logprobs(logits, tokens, temperature=0.7, top_p=0.9, top_k=40, barred=barred, early=early)


@pytest.mark.parametrize("how", [plainly, cut])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_chunks_of_the_head_give_the_logprobs_entropies_and_gradients_of_all_logits(name: str, how: Any) -> None:
    network, batch = make_network(name), collate(SAMPLES)
    whole = SampledLogprobs(network, dtype=torch.float32, whole=True)
    chunks = SampledLogprobs(network, dtype=torch.float32, chunk_logits=5 * VOCABULARY)
    assert not chunks.whole
    expected, expected_entropy = whole(batch, [how])
    wanted = gradients(network, expected)
    found, entropy = chunks(batch, [how])
    assert torch.allclose(found, expected, atol=1e-5)
    assert torch.allclose(entropy, expected_entropy, atol=1e-5)
    assert distance(gradients(network, found), wanted) < TOLERANCE
    assert not entropy.requires_grad


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the most elements of a tensor of floats that is made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else (made,):
            if isinstance(one, Tensor) and one.is_floating_point():
                self.elements = max(self.elements, one.numel())
        return made


def test_no_tensor_has_the_logits_of_all_tokens_in_either_pass() -> None:
    network, long = make_network("llama"), collate([make_sample(90, 80), make_sample(100, 80)])
    largest = {}
    for whole in (True, False):
        logprobs = SampledLogprobs(network, dtype=torch.float32, whole=whole, chunk_logits=20 * VOCABULARY)
        with Largest() as seen:
            logprobs(long, [plainly])[0].sum().backward()  # type: ignore[no-untyped-call]
        largest[whole] = seen.elements
    assert len(long.targets) == 156
    assert largest[True] >= 156 * VOCABULARY
    assert largest[False] <= max(20 * VOCABULARY, 2 * 100 * 48, VOCABULARY * 32)


@pytest.mark.parametrize("settings", [{}, {"kl_coefficient": 0.2}, {"minibatches": 2, "epochs": 2}])
@pytest.mark.parametrize("name", ["qwen3", "llama tied"])
def test_a_step_on_chunks_is_that_on_all_logits(
    name: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    network, samples = make_network(name), list(sampled_in_turns(SAMPLES))
    twin, reference = deepcopy(network), make_network(name)
    with torch.no_grad():
        reference.get_output_embeddings().weight.mul_(1.1)
    stats = []
    for one, elements in ((network, 4 * VOCABULARY), (twin, 1 << 26)):
        monkeypatch.setattr("ebbtide.trainer.learning.learner.CHUNK_LOGITS", elements)
        learner = Learner(
            one, LearnerSettings(learning_rate=1e-3, eos_ids=(2,), **settings), version=3, reference=reference
        )
        stats.append(learner.step(samples, Random(0)))
    assert vars(stats[0]) == pytest.approx(vars(stats[1]), rel=1e-4, abs=1e-5)
    for ours, theirs in zip(network.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=2e-5)


def test_a_network_that_changes_its_logits_in_an_unknown_way_computes_them_all_at_once() -> None:
    network = make_network("llama")
    own = type(network).forward

    def squared(self: Network, **given: Any) -> Any:
        output = own(self, **given)
        output.logits = output.logits.square()
        return output

    network.forward = squared.__get__(network)
    ways = [SampledLogprobs(network, dtype=torch.float32, whole=whole) for whole in (False, True)]
    assert agreeing_logprobs(ways, VOCABULARY, list).whole
    plain = make_network("llama")
    ways = [SampledLogprobs(plain, dtype=torch.float32, whole=whole) for whole in (False, True)]
    assert not agreeing_logprobs(ways, VOCABULARY, list).whole
    assert agreeing_logprobs(ways, VOCABULARY, lambda found: [found[0] + 1.0]).whole, "another rank disagreed"


def test_in_bfloat16_a_second_update_begins_with_the_weights_that_the_first_one_left() -> None:
    """Autocast keeps copies of weights until its context ends."""
    network = make_network("qwen3")
    twin = deepcopy(network)
    once = LearnerSettings(learning_rate=1e-2, dtype="bfloat16")
    separate = Learner(twin, once, version=3)
    for _ in range(2):
        separate.step(SAMPLES, Random(0))
    Learner(network, LearnerSettings(learning_rate=1e-2, dtype="bfloat16", epochs=2), version=3).step(
        SAMPLES, Random(0)
    )
    for ours, theirs in zip(network.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-3)


def test_chunks_in_bfloat16_are_within_its_rounding_and_sum_the_heads_gradient_in_float32() -> None:
    network, batch = make_network("llama"), collate(SAMPLES)
    exact = gradients(network, SampledLogprobs(network, dtype=torch.float32, whole=True)(batch, [plainly])[0])
    errors = {}
    for whole in (True, False):
        logprobs = SampledLogprobs(network, dtype=torch.bfloat16, whole=whole, chunk_logits=2 * VOCABULARY)
        errors[whole] = distance(gradients(network, logprobs(batch, [plainly])[0]), exact)
    assert errors[True] < 0.05
    assert errors[False] < 1.2 * errors[True]
