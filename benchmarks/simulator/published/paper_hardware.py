"""Makes engines of papers' models on papers' devices by a roofline, slowed by what the papers do not state.

A step reads weights and contexts at the devices' bandwidth, and computes at their peak, both times a share that
large kernels reach. How much slower the papers' engines are than that no paper states: `slowness` multiplies all costs
but those of computing.
"""

from typing import Final

from msgspec import Struct

from ebbtide.simulator.engines.engine_profile import EngineDelays, EngineProfile, KvCapacity, StepCosts

#: Shares of the peaks that large kernels reach on these devices. An assumption: `slowness` makes up for it.
_BANDWIDTH_SHARE: Final = 0.8
_COMPUTE_SHARE: Final = 0.5
#: Launches and collectives of a layer, of a captured graph.
_LAYER_S: Final = 2e-5


class Accelerator(Struct, frozen=True, kw_only=True):
    """One device, by its maker's data sheet. H800 differs from H100 in its links alone."""

    name: str
    memory_gb: float = 80.0
    bandwidth: float = 3.35e12  # bytes/s
    flops: float = 989e12  # of dense bfloat16


H100: Final = Accelerator(name="H100")
H800: Final = Accelerator(name="H800")


class PublishedModel(Struct, frozen=True, kw_only=True):
    """A model by its public configuration. Weights are of two bytes, unless stated."""

    name: str
    weights_gb: float
    layers: int
    width: int
    kv_bytes: int  # per token
    active: float  # parameters that a token uses
    expert_gb: float = 0.0  # of `weights_gb`: routed experts
    expert_share: float = 0.0  # of them, that a token uses


QWEN3_8B: Final = PublishedModel(
    name="Qwen3-8B", weights_gb=16.4, layers=36, width=4096, kv_bytes=147_456, active=8.2e9
)
QWEN3_14B: Final = PublishedModel(
    name="Qwen3-14B", weights_gb=29.5, layers=40, width=5120, kv_bytes=163_840, active=14.8e9
)
QWEN25_7B: Final = PublishedModel(
    name="Qwen2.5-7B", weights_gb=15.2, layers=28, width=3584, kv_bytes=57_344, active=7.6e9
)
QWEN25_14B: Final = PublishedModel(
    name="Qwen2.5-14B", weights_gb=29.5, layers=48, width=5120, kv_bytes=196_608, active=14.8e9
)
QWEN25_32B: Final = PublishedModel(
    name="Qwen2.5-32B", weights_gb=65.5, layers=64, width=5120, kv_bytes=262_144, active=32.8e9
)
QWEN2_VL_72B: Final = PublishedModel(
    name="Qwen2-VL-72B", weights_gb=146.0, layers=80, width=8192, kv_bytes=327_680, active=72.7e9
)
MOONLIGHT: Final = PublishedModel(
    name="Moonlight",
    weights_gb=32.0,
    layers=27,
    width=2048,
    kv_bytes=31_104,
    active=3e9,
    expert_gb=28.4,
    expert_share=6 / 64,
)
KIMI_K2: Final = PublishedModel(
    name="Kimi-K2",
    weights_gb=1000.0,
    layers=61,
    width=7168,
    kv_bytes=70_272,
    active=32e9,
    expert_gb=978.0,
    expert_share=8 / 384,
)


def published_engine(
    model: PublishedModel,
    device: Accelerator,
    gpus: int,
    *,
    slowness: float = 1.0,
    sequences: int = 1024,
    layer_s: float = _LAYER_S,
    sequence_s: float = 0.0,
    memory_share: float = 0.9,
) -> EngineProfile:
    """One engine on so many devices.

    `slowness`: see above; `layer_s`: to launch a layer's kernels, behind which the reading of weights hides;
    `sequence_s`: what each decoding sequence adds to a step; `memory_share`: of the devices' memory, for weights and
    cache.
    """
    read = slowness / (gpus * device.bandwidth * _BANDWIDTH_SHARE)  # seconds per byte
    compute = 1.0 / (gpus * device.flops * _COMPUTE_SHARE)  # seconds per operation
    launches_s = model.layers * layer_s
    costs = StepCosts(
        base_s=launches_s,
        sequence_s=sequence_s,
        weights_s=max(0.0, 1e9 * (model.weights_gb - model.expert_gb) * read - launches_s),
        experts_s=1e9 * model.expert_gb * read,
        expert_share=model.expert_share,
        token_s=2.0 * model.active * compute,
        context_s=model.kv_bytes * read,
        pair_s=4.0 * model.layers * model.width * compute,
    )
    room = 1e9 * (gpus * device.memory_gb * memory_share - model.weights_gb)
    return EngineProfile(
        name=f"{gpus}x{device.name}-{model.name}",
        model=model.name,
        device=device.name,
        gpus=gpus,
        source="roofline of the device's data sheet and the model's public configuration",
        costs=costs,
        kv=KvCapacity(tokens=int(room / model.kv_bytes)),
        sequences=sequences,
        weights_gb=model.weights_gb,
        delays=EngineDelays(),
    )
