"""The smallest model that the trainer can train."""

from pathlib import Path


def save_tiny_model(directory: Path, *, head: int = 16) -> Path:
    """A Qwen3 of some ten thousand parameters with the character tokenizer; vLLM on CPUs wants heads of 32 at least."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from ebbtide.trainer.base_model.base_model import character_tokenizer
    from ebbtide.trainer.learning.network import save_network

    tokenizer = character_tokenizer()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=head,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    save_network(Qwen3ForCausalLM(config), tokenizer, directory)
    return directory
