"""Derives profiles from data sheets and model configurations: what a step reads and computes, over what devices can do.

Five efficiencies stand for all that data sheets do not say. They are fitted to published times of vLLM's steps for
Qwen3-8B and Qwen3-14B on one H100 (`tests/unit/simulator/test_roofline.py` has them all) and judged on Qwen3-32B on two
and Qwen3-30B-A3B on one and two. Efficiencies of prefill, training and PCIe are assumed, as is usual for large matrices
and copies; calibrate them where it matters.
"""

from typing import Final, NamedTuple

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
