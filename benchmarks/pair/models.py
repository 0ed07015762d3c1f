"""The two networks of a pair, with random weights: what they say does not matter here, how long it takes does."""

from pathlib import Path
from typing import Final

#: Hidden size and layers: 27 M parameters, of which a prompt of 500 tokens takes two cores a tenth of a second.
SERVED: Final = (512, 8)
#: 3 M parameters.
ROLLOUTS: Final = (256, 4)
_VOCABULARY: Final = 1024


def make_model(path: Path, shape: tuple[int, int], seed: int) -> Path:
    """Write a Qwen3 in bfloat16 with a tokenizer of characters to `path`, unless it is there."""
    if (path / "tokenizer.json").exists():
        return path
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from ebbtide.trainer.characters import character_tokenizer

    hidden, layers = shape
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=_VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 128),
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        eos_token_id=_VOCABULARY - 1,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    character_tokenizer().save_pretrained(path)
    return path
