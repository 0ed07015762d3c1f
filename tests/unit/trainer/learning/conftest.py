"""Small networks, and one thread for torch: tests share their machine with servers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from ebbtide.trainer.base_model.base_model import character_tokenizer
from ebbtide.trainer.learning.network import Network, save_network


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def network() -> Network:
    """Random weights, large enough that the distributions are far from uniform."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(character_tokenizer()),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    return Qwen3ForCausalLM(config).float().eval()


@pytest.fixture
def checkpoint(network: Network, tmp_path: Path) -> Path:
    save_network(network, character_tokenizer(), tmp_path / "checkpoint")
    return tmp_path / "checkpoint"
