"""Answers before anything is loaded whether a training fits into its GPUs, from the model's files and the run's spec.

Pure arithmetic on shapes: the headers of the model's safetensors files give the parameters, its config.json the widths.
`benchmarks/trainer_memory.py` compares the result with the learner's own tensors. It knows no fragments of the
allocator and no kernel's scratch memory, so between `_SURE` and `_ROOMY` it only warns.
"""

import json
import math
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from ebbtide.errors import InvalidRequest
from ebbtide.hub_models import model_folder
from ebbtide.trainer.settings import TrainerSettings
from ebbtide.types.run import RunSpec

_GB: Final = 1e9
#: Bytes of a GPU that a CUDA context, NCCL's buffers and the libraries' workspaces take.
BESIDE: Final = int(2e9)
#: Estimates above this multiple of the memory are refused.
_SURE: Final = 1.15
#: Those above this one are worth a warning.
_ROOMY: Final = 0.9
#: Logits in a chunk of the head, and how many tensors of that size its pass has in float32 at once.
_CHUNK_LOGITS, _CHUNK_TENSORS = 1 << 26, 5
#: Of the pieces in which offloaded moments pass through the GPU.
_STAGES: Final = int(0.4e9)
_LAYER: Final = re.compile(r"\.(\d+)\.")
#: Largest header of a safetensors file that is read.
_HEADER_BYTES: Final = 100 << 20


class ModelShape(Struct, frozen=True, kw_only=True):
    """What of a model decides on memory."""

    parameters: int
    layers: int
    layer: int  # parameters of the largest layer
    edge: int  # parameters outside the layers: embedding, head, last norm
    vocabulary: int
    hidden: int
    attended: int  # elements of queries, keys and values for each token
    inner: int  # width of the feed-forward part that a token passes through


class MemoryPlan(Struct, frozen=True, kw_only=True):
    """What of a training decides on memory."""

    ranks: int = 1
    micro_batch_tokens: int
    longest: int  # tokens of a sample
    low: bool = True  # computes in bfloat16
    offload: bool = False
    reference: bool = False  # a second network, for the KL term
    checkpointing: bool = True  # layers are computed again in the backward pass

    @property
    def tokens(self) -> int:
        """Of the largest micro-batch: a sample is never cut."""
        return max(self.micro_batch_tokens, self.longest)


class Card(Struct, frozen=True, kw_only=True):
    """A GPU."""

    name: str
    memory: int  # bytes


class MemoryEstimate(Struct, frozen=True, kw_only=True):
    """Bytes of each rank."""

    state: int  # weights, gradients and moments, in float32
    gathered: int  # whole layers, and copies in the dtype of computation
    activations: int
    head: int
    host: int  # of the host's memory

    @property
    def device(self) -> int:
        return self.state + self.gathered + self.activations + self.head


def read_shape(model: Path) -> ModelShape | None:
    """Reads the shape of a checkpoint; None if it is not one that is understood."""
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        config = config.get("text_config", config)
        sizes = dict(size for path in sorted(model.glob("model*.safetensors")) for size in _sizes(path))
        hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
        heads = int(config["num_attention_heads"])
        kv_heads, width = config.get("num_key_value_heads") or heads, config.get("head_dim") or hidden // heads
        inner, vocabulary = _inner(config), int(config["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, struct.error, ZeroDivisionError):
        return None
    by_layer = Counter[str]()
    for name, size in sizes.items():
        if (layer := _LAYER.search(name)) is not None:
            by_layer[layer[1]] += size
    if not by_layer:
        return None
    parameters = sum(sizes.values())
    return ModelShape(
        parameters=parameters,
        layers=layers,
        layer=max(by_layer.values()),
        edge=parameters - sum(by_layer.values()),
        vocabulary=vocabulary,
        hidden=hidden,
        attended=int((heads + 2 * kv_heads) * width),
        inner=inner,
    )


def _inner(config: Mapping[str, Any]) -> int:
    """The width that a token passes through: of a mixture, that of its experts together."""
    each = int(config.get("num_experts_per_tok") or 0)
    own = config.get("moe_intermediate_size") or config["intermediate_size"]
    shared = int(config.get("shared_expert_intermediate_size") or 0)
    return each * int(own) + shared if each else int(config["intermediate_size"])


def _sizes(path: Path) -> Iterator[tuple[str, int]]:
    """Yields each tensor of a safetensors file with its number of elements."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > _HEADER_BYTES:
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(file.read(length))
    for name, entry in header.items():
        if name != "__metadata__":
            yield name, math.prod(entry["shape"])


def estimate(shape: ModelShape, plan: MemoryPlan) -> MemoryEstimate:
    """Returns the bytes at a step's peak, in its second micro-batch: gradients are there already."""
    held = 8 if plan.offload else 16
    state = held * shape.parameters // plan.ranks + (_STAGES if plan.offload else 0)
    if plan.reference:
        state += 4 * shape.parameters // plan.ranks
    return MemoryEstimate(
        state=state,
        gathered=_gathered(shape, plan),
        activations=_activations(shape, plan),
        head=_head(shape, plan),
        host=(8 * shape.parameters // plan.ranks if plan.offload else 0),
    )


def _gathered(shape: ModelShape, plan: MemoryPlan) -> int:
    width = 2 if plan.low else 4
    if plan.ranks == 1:
        return width * (shape.layer + shape.edge) if plan.low else 0  # copies in bfloat16, of a layer and the edge
    # Two layers, as the next is gathered ahead, and the gradient of one; the edge stays all the while, with its own.
    return width * (3 * shape.layer + 2 * shape.edge)


def _activations(shape: ModelShape, plan: MemoryPlan) -> int:
    width = 2 if plan.low else 4
    stream = width * shape.hidden if plan.ranks > 1 else 4 * shape.hidden  # autocast adds to a float32 stream
    layer = _layer_bytes(shape, plan)
    kept = stream * shape.layers + layer if plan.checkpointing else layer * shape.layers
    return plan.tokens * kept


def _layer_bytes(shape: ModelShape, plan: MemoryPlan) -> int:
    """Bytes for each token that a layer's backward pass needs."""
    width = 2 if plan.low else 4
    return 12 * shape.hidden + width * (4 * shape.hidden + 3 * shape.attended + 4 * shape.inner)


def _head(shape: ModelShape, plan: MemoryPlan) -> int:
    chunk = min(_CHUNK_LOGITS, plan.tokens * shape.vocabulary)
    weight = 4 * shape.vocabulary * shape.hidden  # the sum of its gradient
    return 4 * _CHUNK_TENSORS * chunk + weight + 8 * plan.tokens * shape.hidden


def check_fit(shape: ModelShape, plan: MemoryPlan, card: int, *, name: str = "the GPU") -> str:
    """Returns a warning, or nothing, for a card of so many bytes. Raises `InvalidRequest` naming the field that would
    have to change if the training cannot fit."""
    room = card - BESIDE
    found = estimate(shape, plan)
    if found.device <= _ROOMY * room:
        return ""
    field, remedy = _remedy(shape, plan, room)
    text = (
        f"a step would take about {found.device / _GB:.0f} GB of {name}'s {card / _GB:.0f} (state "
        f"{found.state / _GB:.0f}, gathered weights {found.gathered / _GB:.0f}, activations of {plan.tokens} tokens "
        f"{found.activations / _GB:.0f}, head {found.head / _GB:.0f}): {remedy}"
    )
    if found.device > _SURE * room:
        raise InvalidRequest(text, field=field)
    return text


def _remedy(shape: ModelShape, plan: MemoryPlan, room: int) -> tuple[str, str]:
    """Returns the field to change and how, for the least change that fits by this estimate."""
    fewer = largest_micro_batch(shape, plan, room)
    if fewer >= plan.longest:
        return "trainer.micro_batch_tokens", f"set it to {fewer}"
    away = replace(plan, offload=True)
    if not plan.offload and (fewer := largest_micro_batch(shape, away, room)) >= plan.longest:
        more = "" if fewer >= plan.micro_batch_tokens else f", and this to {fewer}"
        return "trainer.micro_batch_tokens", f"set offload of the trainer (EBBTIDE_OFFLOAD=true){more}"
    for ranks in (2 * plan.ranks, 4 * plan.ranks, 8 * plan.ranks):
        if (fewer := largest_micro_batch(shape, replace(plan, ranks=ranks, offload=True), room)) >= plan.longest:
            return "model", f"take {ranks} ranks with offload, and trainer.micro_batch_tokens of {fewer}"
    return "model", "take a smaller model, shorter responses, or more and larger GPUs"


def largest_micro_batch(shape: ModelShape, plan: MemoryPlan, room: int) -> int:
    """The most tokens of a micro-batch, a multiple of 256, with which a step takes at most `_ROOMY` of `room` bytes."""
    low, high = 0, 1 << 12
    while low < high:
        middle = (low + high + 1) // 2
        tried = replace(plan, micro_batch_tokens=256 * middle, longest=0)
        low, high = (middle, high) if estimate(shape, tried).device <= _ROOMY * room else (low, middle - 1)
    return 256 * low


def check_memory(spec: RunSpec, settings: TrainerSettings, *, ranks: int, longest: int) -> str:
    """Checks a run of the built-in trainer on this host's GPUs; `longest`: tokens that a sample may have for sure.

    Returns a warning, or nothing: also where there is no GPU, or the model is of an unknown form. Raises
    `InvalidRequest`.
    """
    if not spec.built_in or (card := smallest_card(settings.device, ranks)) is None:
        return ""
    shape = read_shape(model_folder(spec.model))
    plan = MemoryPlan(
        ranks=ranks,
        micro_batch_tokens=spec.trainer.micro_batch_tokens,
        longest=longest,
        low=spec.trainer.dtype != "float32",
        offload=settings.offload,
        reference=spec.trainer.kl_coefficient > 0,
        checkpointing=spec.trainer.gradient_checkpointing is not False,
    )
    return "" if shape is None else check_fit(shape, plan, card.memory, name=card.name)


def smallest_card(device: str, ranks: int) -> Card | None:
    """The GPU with the least memory of those that the ranks on this host would take; None without one."""
    if device == "cpu":
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    found = [torch.cuda.get_device_properties(number) for number in range(min(ranks, torch.cuda.device_count()))]
    least = min(found, key=lambda one: one.total_memory)
    return Card(name=least.name, memory=least.total_memory)
