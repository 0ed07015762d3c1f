"""Checkpoints with random weights, for tests with real engines."""

from collections.abc import Callable
from pathlib import Path

import pytest

Maker = Callable[..., Path]


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """Makes a Qwen3 of 0.4 M parameters over 128 tokens, the last one ending a text, as a checkpoint directory."""

    def make(seed: int, *, tied: bool = False) -> Path:
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

        from ebbtide.trainer.characters import character_tokenizer

        torch.manual_seed(seed)
        config = Qwen3Config(
            vocab_size=128,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=1024,
            tie_word_embeddings=tied,
            eos_token_id=127,
            pad_token_id=0,
        )
        model = Qwen3ForCausalLM(config).float()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:  # sharp enough that greedy choices are no ties
                    parameter.normal_(0, 0.1)
        path = tmp_path_factory.mktemp("checkpoint")
        model.save_pretrained(path)
        character_tokenizer().save_pretrained(path)
        return path

    return make
