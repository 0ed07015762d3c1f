"""Derives profiles of engines and trainers from data sheets of GPUs and configurations of models.

Five efficiencies stand for all that data sheets do not say. They are fitted to published times of vLLM's steps for
Qwen3-8B and Qwen3-14B on one H100 (`tests/unit/simulator/test_roofline.py` has them all) and judged on Qwen3-32B on two
and Qwen3-30B-A3B on one and two. Efficiencies of prefill, training and PCIe are assumed, as is usual for large matrices
and copies; calibrate them where it matters.
"""

import re
from typing import Annotated, Final, NamedTuple

from msgspec import Meta, Struct

from ebbtide.checked_files import suggestion
from ebbtide.errors import InvalidRequest
from ebbtide.simulator.engines.engine_profile import EngineDelays, EngineProfile, KvCapacity, StepCosts
from ebbtide.simulator.engines.trainer_profile import TrainerCosts, TrainerDelays, TrainerProfile


class DeviceSheet(NamedTuple):
    """What a data sheet says of one GPU, dense, per second."""

    name: str
    memory_bytes: float
    bandwidth: float  # bytes of its memory
    flops: float  # bf16
    pcie: float  # bytes in one direction


class ModelShape(NamedTuple):
    """What a model's configuration says. Bytes of a weight are those of its checkpoint."""

    name: str
    weights: float  # without routed experts
    experts: float = 0.0  # weights of all routed experts
    expert_share: float = 0.0  # share of them that a token uses
    layers: int = 0
    heads: int = 0
    head_dim: int = 0  # of queries and keys
    kv_bytes: int = 0  # of keys and values of one token, all layers, bf16
    weight_bytes: float = 2.0

    @property
    def bytes(self) -> float:
        return (self.weights + self.experts) * self.weight_bytes

    @property
    def active(self) -> float:
        """Weights that one token uses."""
        return self.weights + self.experts * self.expert_share


class Efficiencies(NamedTuple):
    """Shares of what the data sheet says, and what it does not say."""

    base_s: float = 2.7e-3  # fitted: of every step
    weights: float = 0.96  # fitted: of the bandwidth, for weights
    contexts: float = 0.94  # fitted: of the bandwidth, for keys and values
    decode: float = 0.36  # fitted: of the operations, for the few tokens of decoding
    exchange_s: float = 20e-6  # fitted: of one sum over the GPUs of a host; there are two in each layer
    prefill: float = 0.6  # assumed: of the operations
    train: float = 0.4  # assumed: of the operations, with FSDP
    pcie: float = 0.75  # assumed: of PCIe's bandwidth
    memory: float = 0.9  # of the memory may be used, vLLM's default


FITTED: Final = Efficiencies()
#: vLLM's defaults on GPUs with as much memory.
_BATCHED_TOKENS: Final = 8192
_SEQUENCES: Final = 1024
#: Operations per weight and token: two forward, four backward, and two to recompute activations.
_TRAIN_OPERATIONS: Final = 8.0
#: Operations per pair of tokens, layer and element of a head: two products of two operations each, forward.
_PAIR_OPERATIONS: Final = 4.0


def roofline_engine(
    model: ModelShape, device: DeviceSheet, gpus: int, *, efficiency: Efficiencies = FITTED
) -> EngineProfile:
    """An engine on `gpus` devices of one host that share all weights."""
    # A data sheet's rate for 8-bit operands is twice that for bf16.
    bandwidth, operations = device.bandwidth * gpus, device.flops * gpus * 2 / model.weight_bytes
    exchanges_s = 2 * efficiency.exchange_s * (gpus > 1) * model.layers
    token = 2 * model.active / operations
    weights_gb, pcie = model.bytes / 1e9, device.pcie * efficiency.pcie * gpus
    return EngineProfile(
        name=profile_name(model.name, device.name, gpus),
        model=model.name,
        device=device.name,
        gpus=gpus,
        source="derived from data sheets and the model's configuration",
        costs=StepCosts(
            base_s=efficiency.base_s + exchanges_s,
            weights_s=model.weight_bytes * model.weights / bandwidth / efficiency.weights,
            experts_s=model.weight_bytes * model.experts / bandwidth / efficiency.weights,
            expert_share=model.expert_share,
            token_s=token / efficiency.prefill,
            sequence_s=token / efficiency.decode - token / efficiency.prefill,
            context_s=model.kv_bytes / bandwidth / efficiency.contexts,
            pair_s=_PAIR_OPERATIONS * model.layers * model.heads * model.head_dim / operations / efficiency.prefill,
        ),
        kv=KvCapacity(tokens=int(kv_room(model, device, gpus, efficiency) / model.kv_bytes)),
        batched_tokens=_BATCHED_TOKENS,
        sequences=_SEQUENCES,
        weights_gb=weights_gb,
        delays=EngineDelays(install_s_per_gb=1e9 / pcie, wake_s=weights_gb * 1e9 / pcie),
    )


def roofline_trainer(
    model: ModelShape, device: DeviceSheet, gpus: int, *, efficiency: Efficiencies = FITTED
) -> TrainerProfile:
    """A trainer whose ranks shard weights and optimiser, and recompute activations."""
    operations = device.flops * efficiency.train
    pairs = _PAIR_OPERATIONS * model.layers * model.heads * model.head_dim
    return TrainerProfile(
        name=profile_name(model.name, device.name, gpus),
        model=model.name,
        device=device.name,
        gpus=gpus,
        source="derived from data sheets and the model's configuration",
        costs=TrainerCosts(
            token_s=_TRAIN_OPERATIONS * model.active / operations,
            pair_s=_TRAIN_OPERATIONS / 2 * pairs / operations,
            update_s=_update_bytes(model) / gpus / device.bandwidth / efficiency.weights,
            forward_share=2 / _TRAIN_OPERATIONS,
        ),
        ranks=gpus,
        weights_gb=model.bytes / 1e9,
        patch_share=0.05,  # 2 to 5 % of bf16 weights change in a step (verl#7060, vime#392)
        delays=TrainerDelays(snapshot_s=model.bytes / gpus / device.pcie / efficiency.pcie),
    )


def kv_room(model: ModelShape, device: DeviceSheet, gpus: int, efficiency: Efficiencies = FITTED) -> float:
    """Bytes that the weights leave to keys and values; below 0: the weights do not fit."""
    return efficiency.memory * device.memory_bytes * gpus - model.bytes


def profile_name(model: str, device: str, gpus: int) -> str:
    return f"{device}x{gpus}-{model}".lower()


def _update_bytes(model: ModelShape) -> float:
    """AdamW reads weight, gradient and two moments in float32, and writes three of them."""
    return 7 * 4 * (model.weights + model.experts)


#: NVIDIA H100 SXM data sheet: 80 GB HBM3 at 3.35 TB/s, 989 TFLOP/s bf16 without sparsity, PCIe 5.0 x16 (64 GB/s).
H100: Final = DeviceSheet("H100", 80e9, 3.35e12, 989e12, 64e9)
#: The H800 SXM has the H100's memory and cores, and slower links between GPUs.
H800: Final = DeviceSheet("H800", 80e9, 3.35e12, 989e12, 64e9)
#: Key and value, bf16.
_KV: Final = 2 * 2
#: What DeepSeek-V3's attention keeps of a token in each layer: 512 of the latent and 64 of the position, bf16.
_LATENT: Final = (512 + 64) * 2


def _dense(name: str, weights: float, layers: int, heads: int, kv_heads: int) -> ModelShape:
    """A model with grouped queries and heads of 128; `weights` of its safetensors."""
    kv_bytes = _KV * layers * kv_heads * 128
    return ModelShape(name, weights, layers=layers, heads=heads, head_dim=128, kv_bytes=kv_bytes)


#: From the models' config.json and the sizes of their safetensors on Hugging Face.
QWEN3_8B: Final = _dense("Qwen3-8B", 8.19e9, 36, 32, 8)
QWEN3_14B: Final = _dense("Qwen3-14B", 14.77e9, 40, 40, 8)
QWEN3_32B: Final = _dense("Qwen3-32B", 32.76e9, 64, 64, 8)
QWEN25_7B: Final = _dense("Qwen2.5-7B", 7.62e9, 28, 28, 4)
QWEN25_14B: Final = _dense("Qwen2.5-14B", 14.77e9, 48, 40, 8)
QWEN25_32B: Final = _dense("Qwen2.5-32B", 32.76e9, 64, 40, 8)
QWEN2_VL_72B: Final = _dense("Qwen2-VL-72B", 73.4e9, 80, 64, 8)
#: 48 layers of 128 experts, 8 of them for a token: 3 matrices of 2048 x 768 each.
QWEN3_30B_A3B: Final = ModelShape(
    "Qwen3-30B-A3B",
    weights=30.53e9 - 48 * 128 * 3 * 2048 * 768,
    experts=48 * 128 * 3 * 2048 * 768,
    expert_share=8 / 128,
    layers=48,
    heads=32,
    head_dim=128,
    kv_bytes=48 * _KV * 4 * 128,
)
#: 26 of 27 layers with 64 experts, 6 of them for a token: 3 matrices of 2048 x 1408 each.
MOONLIGHT: Final = ModelShape(
    "Moonlight-16B-A3B",
    weights=15.96e9 - 26 * 64 * 3 * 2048 * 1408,
    experts=26 * 64 * 3 * 2048 * 1408,
    expert_share=6 / 64,
    layers=27,
    heads=16,
    head_dim=192,
    kv_bytes=27 * _LATENT,
)
#: 60 of 61 layers with 384 experts, 8 of them for a token: 3 matrices of 7168 x 2048 each; FP8 weights.
KIMI_K2: Final = ModelShape(
    "Kimi-K2",
    weights=1.026e12 - 60 * 384 * 3 * 7168 * 2048,
    experts=60 * 384 * 3 * 7168 * 2048,
    expert_share=8 / 384,
    layers=61,
    heads=64,
    head_dim=192,
    kv_bytes=61 * _LATENT,
    weight_bytes=1.0,
)
#: By whose names profiles are derived.
GPUS: Final = (H100, H800)
MODELS: Final = (
    *(QWEN3_8B, QWEN3_14B, QWEN3_32B, QWEN3_30B_A3B),
    *(QWEN25_7B, QWEN25_14B, QWEN25_32B, QWEN2_VL_72B, MOONLIGHT, KIMI_K2),
)


#: The roofline's exchange between GPUs is that of one host.
_MOST_TP: Final = 8
_NAME: Final = re.compile(r"(?P<gpu>[a-z0-9]+)x(?P<gpus>[1-9]\d{0,4})-(?P<model>.+)")
_GPUS: Final = {gpu.name.lower(): gpu for gpu in GPUS}
_MODELS: Final = {model.name.lower(): model for model in MODELS}


class EngineOn(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine as a scenario may state it. Its text is the profile's name."""

    model: str  # one of those that `ebbtide simulate --list` shows
    gpu: str  # likewise
    tp: Annotated[int, Meta(ge=1, le=_MOST_TP)] = 1  # GPUs of one host that share each layer (tensor parallelism)

    def __str__(self) -> str:
        return profile_name(self.model, self.gpu, self.tp)


class TrainerOn(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A trainer as a scenario may state it. Its text is the profile's name."""

    model: str  # one of those that `ebbtide simulate --list` shows
    gpu: str  # likewise
    gpus: Annotated[int, Meta(ge=1, le=99_999)]  # number of GPUs

    def __str__(self) -> str:
        return profile_name(self.model, self.gpu, self.gpus)


def derived_engine(name: str) -> EngineProfile:
    """The profile of a name such as `h100x2-qwen3-14b`. Raises `InvalidRequest` if it is unknown or has no room."""
    model, gpu, gpus = _parts(name)
    if gpus > _MOST_TP:
        raise InvalidRequest(f"has {gpus} GPUs; an engine has at most {_MOST_TP}, those of a host", field=name)
    if kv_room(model, gpu, gpus) < model.kv_bytes:
        told = f"{model.name}'s {model.bytes / 1e9:.0f} GB leave no memory for the KV cache on {gpus} {gpu.name}"
        raise InvalidRequest(f"{told}; take more GPUs, or a profile of your own", field=name)
    return roofline_engine(model, gpu, gpus)


def derived_trainer(name: str) -> TrainerProfile:
    """The profile of a name such as `h100x8-qwen3-14b`. Raises `InvalidRequest` for what is not known."""
    return roofline_trainer(*_parts(name))


def _parts(name: str) -> tuple[ModelShape, DeviceSheet, int]:
    found = _NAME.fullmatch(name.lower())
    if found is None:
        form = "GPU, x, number of GPUs, - and model, as in h100x2-qwen3-14b"
        raise InvalidRequest(f"names no profile; write {form}, or a path that ends with .toml", field=name)
    gpu, model = found["gpu"], found["model"]
    if gpu not in _GPUS:
        raise InvalidRequest(f"no GPU is called {gpu!r}{suggestion(gpu, list(_GPUS))}", field=name)
    if model not in _MODELS:
        raise InvalidRequest(f"no model is called {model!r}{suggestion(model, list(_MODELS))}", field=name)
    return _MODELS[model], _GPUS[gpu], int(found["gpus"])
