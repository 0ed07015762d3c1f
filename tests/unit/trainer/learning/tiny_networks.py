"""Tiny networks of several architectures, samples for them, and the gradients of their logprobs."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from ebbtide.trainer.learning.grpo import sampling_logprobs
from ebbtide.trainer.learning.network import Network
from ebbtide.trainer.learning.training_batches import TrainingSample
from ebbtide.types.rollout import SampledResponse
from ebbtide.types.run import Sampling

#: Of the norm of the difference to the norm of the gradient, in float32.
TOLERANCE = 1e-5
VOCABULARY = 150
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": False},
    "qwen3 tied": {"tie_word_embeddings": True},
    "llama": {"tie_word_embeddings": False},
    "llama tied": {"tie_word_embeddings": True},
    "gemma2": {"final_logit_softcapping": 3.0, "tie_word_embeddings": True, "query_pre_attn_scalar": 16},
    "cohere": {"logit_scale": 0.25, "tie_word_embeddings": True},
    "granite": {"logits_scaling": 4.0, "tie_word_embeddings": False},
}


def make_network(name: str) -> Network:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[name.split(maxsplit=1)[0]](**SHAPE, **ARCHITECTURES[name])
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def make_sample(length: int, sampled: int, *, advantage: float = 1.0, version: int = 3) -> TrainingSample:
    rng = np.random.default_rng(length)
    mask = np.ones(sampled, dtype=np.bool_)
    mask[1:3] = False
    return TrainingSample(
        ids=rng.integers(5, VOCABULARY, length),
        mask=mask,
        logprobs=np.where(mask, -5.0, np.nan).astype(np.float32),
        versions=np.full(sampled, version),
        advantage=advantage,
    )


SAMPLES = [make_sample(9, 7), make_sample(24, 12, advantage=-0.5), make_sample(14, 9, advantage=2.0)]


def sampled_in_turns(samples: list[TrainingSample]) -> Iterator[TrainingSample]:
    """Each has two responses, sampled differently."""
    for one in samples:
        first = SampledResponse(start=0, end=1, sampling=Sampling(temperature=0.8))
        second = SampledResponse(start=3, end=len(one.mask), sampling=Sampling(top_k=30, min_tokens=2))
        yield TrainingSample(one.ids, one.mask, one.logprobs, one.versions, one.advantage, (first, second))


def plainly(logits: Tensor, tokens: Tensor, _positions: Tensor) -> Tensor:
    return sampling_logprobs(logits, tokens)


def gradients(network: Network, logprobs: Tensor) -> Tensor:
    """Of a loss in which each token weighs differently, flattened."""
    network.zero_grad()
    (logprobs * torch.linspace(-1.0, 2.0, len(logprobs))).sum().backward()  # type: ignore[no-untyped-call]
    return torch.cat([one.grad.flatten() for one in network.parameters() if one.grad is not None])


def distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())
