"""Writes the model that is served beside a run: a Qwen3 with random weights, made with numpy alone.

Only its speed matters: with 27 million parameters, a prompt of 500 tokens takes two cores about a tenth of a second.
`python -m ebbtide.local_cluster.serving_checkpoint FOLDER` makes it below a folder, and prints its path.
"""

import json
import shutil
import string
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

#: Part of the folder's name. Raise it when the files change.
_RECIPE: Final = 1
_SPECIAL: Final = ("<pad>", "<eos>", "<unk>", "<|user|>", "<|assistant|>")
_PAD, _END, _UNKNOWN = range(3)
_CHAT: Final = (
    "{% for message in messages %}<|{{ message['role'] if message['role'] == 'assistant' else 'user' }}|>"
    "{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
#: Standard deviation of the matrices, as in transformers.
_SPREAD: Final = 0.02


class ServedNetwork(Struct, frozen=True, kw_only=True):
    """Shape of a Qwen3 with untied embeddings, in bfloat16."""

    hidden: int = 512
    layers: int = 8
    heads: int = 8
    kv_heads: int = 4
    head: int = 64
    feed_forward: int = 1536
    vocabulary: int = 1024
    context: int = 8192


def served_model(cache: Path, network: ServedNetwork | None = None, seed: int = 1) -> Path:
    """Returns a checkpoint below `cache`, made unless it exists. The same network and seed give the same bytes."""
    network = network or ServedNetwork()
    shape = "x".join(map(str, msgspec.structs.astuple(network)))
    path = cache / f"served-{shape}-seed{seed}-v{_RECIPE}"
    if path.exists():
        return path
    cache.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=".served.", dir=cache))
    try:
        for name, content in _texts(network).items():
            (beside / name).write_text(json.dumps(content, indent=2))
        _write_weights(beside / "model.safetensors", network, seed)
        beside.chmod(0o755)
        beside.replace(path)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return path


def _write_weights(path: Path, network: ServedNetwork, seed: int) -> None:
    """Writes the header's length (8 bytes, little endian), a JSON header, and the tensors one after another."""
    random = np.random.default_rng(seed)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in _shapes(network):
        begin, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, shape in _shapes(network):
            file.write(_bfloat16(_values(random, shape)).tobytes())


def _values(random: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Makes norms of ones, and random matrices."""
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    return _SPREAD * random.standard_normal(shape, np.float32)


def _bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Keeps the upper half of each float32: random values need no rounding."""
    return (values.view(np.uint32) >> 16).astype("<u2")


def _shapes(network: ServedNetwork) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Lists each tensor by its name in Qwen3 checkpoints."""
    hidden, queries, keys = network.hidden, network.heads * network.head, network.kv_heads * network.head
    yield "model.embed_tokens.weight", (network.vocabulary, hidden)
    for layer in range(network.layers):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", (hidden,)
        yield f"{at}.self_attn.q_proj.weight", (queries, hidden)
        yield f"{at}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{at}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{at}.self_attn.q_norm.weight", (network.head,)
        yield f"{at}.self_attn.k_norm.weight", (network.head,)
        yield f"{at}.self_attn.o_proj.weight", (hidden, queries)
        yield f"{at}.post_attention_layernorm.weight", (hidden,)
        yield f"{at}.mlp.gate_proj.weight", (network.feed_forward, hidden)
        yield f"{at}.mlp.up_proj.weight", (network.feed_forward, hidden)
        yield f"{at}.mlp.down_proj.weight", (hidden, network.feed_forward)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (network.vocabulary, hidden)


def _texts(network: ServedNetwork) -> dict[str, dict[str, Any]]:
    """file name -> its JSON: the configuration, and a tokenizer with a token per character."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_size": network.hidden,
        "intermediate_size": network.feed_forward,
        "num_hidden_layers": network.layers,
        "num_attention_heads": network.heads,
        "num_key_value_heads": network.kv_heads,
        "head_dim": network.head,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": _SPREAD,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": network.context,
        "vocab_size": network.vocabulary,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": _END,
        "pad_token_id": _PAD,
    }
    ends = {"eos_token_id": _END, "pad_token_id": _PAD}
    names = {"pad_token": _SPECIAL[_PAD], "eos_token": _SPECIAL[_END], "unk_token": _SPECIAL[_UNKNOWN]}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": network.context, "chat_template": _CHAT}
    return {
        "config.json": config,
        "generation_config.json": ends,
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": {**kind, **names},
    }


def _tokenizer() -> dict[str, Any]:
    """Describes the tokenizer for the `tokenizers` library; it knows printable ASCII and the newline."""
    characters = ["\n", " ", *string.ascii_letters, *string.digits, *string.punctuation]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": number, "content": text, "special": True, **flags} for number, text in enumerate(_SPECIAL)]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "WordLevel",
            "vocab": {text: number for number, text in enumerate([*_SPECIAL, *characters])},
            "unk_token": _SPECIAL[_UNKNOWN],
        },
    }


if __name__ == "__main__":
    print(served_model(Path(sys.argv[1])))  # noqa: T201 - this is a command
