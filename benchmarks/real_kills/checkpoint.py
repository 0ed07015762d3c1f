"""A tiny network with random weights, as a checkpoint that engines boot from."""

from pathlib import Path


def make_checkpoint(
    path: Path,
    seed: int,
    *,
    tied: bool = False,
    vocab_size: int = 128,
    spread: float = 0.1,
    hidden_size: int = 128,
    layers: int = 2,
    positions: int = 1024,
) -> Path:
    """Write a Qwen3, of 0.4 M parameters unless it is told otherwise, in float32 to `path`; its last token ends a text.

    `spread` is the standard deviation of its matrices: at 0.1 greedy choices are no ties, so that they are the same
    however requests are batched.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from ebbtide.trainer.base_model.base_model import character_tokenizer

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=positions,
        tie_word_embeddings=tied,
        eos_token_id=vocab_size - 1,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, spread)
    model.save_pretrained(path)
    character_tokenizer().save_pretrained(path)
    return path
