"""Networks with the shapes of Qwen3 and random weights, as checkpoints and as bare tensors.

Time and memory of a step, of a patch and of a pause hang on shapes and not on what the weights say. Only the share of
elements that a step changes hangs on their values; matrices are drawn as wide as trained ones are.
"""

from pathlib import Path
from typing import Any, Final

import torch
from msgspec import Struct
from torch import Tensor

#: Standard deviation of matrices. Wide enough for the outputs of different versions to be told apart.
SPREAD: Final = 0.04
#: Elements that are changed at once, so that random numbers take little memory.
_CHANGED_AT_ONCE: Final = 1 << 26


class Shape(Struct, frozen=True, kw_only=True):
    """A Qwen3: grouped-query attention, RMS norms on queries and keys, SwiGLU."""

    name: str
    hidden: int
    feed_forward: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    vocabulary: int = 151_936
    tied: bool = True

    @property
    def matrices(self) -> int:
        """Elements that a token is multiplied with, forward: those of all layers and of the head."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.feed_forward) + self.hidden * self.vocabulary

    @property
    def parameters(self) -> int:
        norms = self.layers * 2 * (self.hidden + self.head_dim) + self.hidden
        return self.matrices + norms + (0 if self.tied else self.hidden * self.vocabulary)

    def training_flops(self, tokens: int) -> float:
        """Floating-point operations of forward and backward of one sequence: six for each element and token, and the
        two products of causal attention (Megatron-LM, Narayanan et al. 2021, appendix A, without recomputation)."""
        attention = 6.0 * self.layers * self.heads * self.head_dim * tokens * tokens
        return 6.0 * self.matrices * tokens + attention


QWEN3_600M: Final = Shape(name="0.6B", hidden=1024, feed_forward=3072, layers=28, heads=16, kv_heads=8)
QWEN3_1700M: Final = Shape(name="1.7B", hidden=2048, feed_forward=6144, layers=28, heads=16, kv_heads=8)
QWEN3_8B: Final = Shape(name="8B", hidden=4096, feed_forward=12288, layers=36, heads=32, kv_heads=8, tied=False)
#: What a CPU can do in seconds; vLLM's CPU build wants heads of 32 elements or more.
SMALL: Final = Shape(
    name="small", hidden=64, feed_forward=128, layers=2, heads=4, kv_heads=2, head_dim=32, vocabulary=512, tied=False
)


def network(shape: Shape, device: str, seed: int = 1) -> Any:
    """A network of `transformers` in bf16 with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=40_960,
        tie_word_embeddings=shape.tied,
        initializer_range=SPREAD,
        eos_token_id=shape.vocabulary - 1,
        pad_token_id=0,
        dtype=torch.bfloat16,
    )
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


def checkpoint(models: Path, shape: Shape, device: str) -> Path:
    """The directory of a bf16 checkpoint, which is made once for all parts that share `models`."""
    from ebbtide.trainer.base_model.base_model import character_tokenizer

    path = models / shape.name
    if not path.exists():
        unfinished = models / f".{shape.name}"
        made = network(shape, device)
        made.save_pretrained(unfinished, max_shard_size="64GB")
        character_tokenizer().save_pretrained(unfinished)
        unfinished.rename(path)
        del made
        release(device)
    return path


def tensors(shape: Shape, device: str, seed: int = 1) -> dict[str, Tensor]:
    """The tensors of such a checkpoint in bf16, alone."""
    kept = {name: tensor.detach() for name, tensor in network(shape, device, seed).named_parameters()}
    return kept if not shape.tied else {name: tensor for name, tensor in kept.items() if name != "lm_head.weight"}


def change(weights: dict[str, Tensor], share: float, seed: int, factor: float = 1.0625) -> None:
    """Multiplies this share of the elements of each tensor in place. The default `factor` makes small steps, as an
    optimiser does."""
    for number, tensor in enumerate(weights.values()):
        generator = torch.Generator(tensor.device).manual_seed(seed * 1009 + number)
        flat = tensor.view(-1)
        for start in range(0, flat.numel(), _CHANGED_AT_ONCE):
            part = flat[start : start + _CHANGED_AT_ONCE]
            hit = torch.rand(part.shape, generator=generator, device=tensor.device) < share
            part.copy_(torch.where(hit, part * factor, part))


def changed_file(source: Path, folder: Path, share: float, device: str) -> tuple[Path, Path]:
    """Another version of the checkpoint `source` as a safetensors file, and the file of its changes, as workers pass
    them to engines: NAME.indices (int64) and NAME.values. Signs change, so that both say different things."""
    from safetensors.torch import load_file, save_file

    before = load_file(source / "model.safetensors", device=device)
    after = {name: tensor.clone() for name, tensor in before.items()}
    change(after, share, 5, -1.0)
    found: dict[str, Tensor] = {}
    for name, tensor in after.items():
        places = (tensor != before[name]).flatten().nonzero().flatten()
        found |= {f"{name}.indices": places, f"{name}.values": tensor.flatten()[places]}
    weights, changes = folder / "second.safetensors", folder / "changes"
    save_file(after, weights)
    save_file(found, changes)
    del before, after, found
    release(device)
    return weights, changes


def prompts(count: int, length: int, shape: Shape) -> list[list[int]]:
    """Different ids of the tokenizer's few characters, so that any text of them decodes."""
    most = min(96, shape.vocabulary - 1)
    return [[(number * 31 + place * 7 + place * place) % most for place in range(length)] for number in range(count)]


def device_bytes() -> int:
    """The memory of the first GPU."""
    return int(torch.cuda.get_device_properties(0).total_memory)


def release(device: str) -> None:
    """Gives memory that torch keeps for later back to the device."""
    import gc

    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def settle(device: str) -> None:
    """Waits until the device has done all that was asked of it."""
    if device != "cpu":
        torch.cuda.synchronize()
