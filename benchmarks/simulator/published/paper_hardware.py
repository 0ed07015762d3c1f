"""Makes engines of papers' models on papers' devices by a roofline, slowed by what the papers do not state.

`engines/roofline.py` derives profiles with efficiencies that are fitted to one engine's published steps. Here one
setting of each paper stands for its engine, and is fitted to that paper alone.

A step reads weights and contexts at the devices' bandwidth, and computes at their peak, both times a share that
large kernels reach. How much slower the papers' engines are than that no paper states: `slowness` multiplies all costs
but those of computing.
"""

from typing import Final

from ebbtide.simulator.engines.engine_profile import EngineProfile, KvCapacity, StepCosts
from ebbtide.simulator.engines.roofline import DeviceSheet, ModelShape

#: Shares of the peaks that large kernels reach on these devices. An assumption: `slowness` makes up for it.
_BANDWIDTH_SHARE: Final = 0.8
_COMPUTE_SHARE: Final = 0.5
#: Launches and collectives of a layer, of a captured graph.
_LAYER_S: Final = 2e-5


def published_engine(
    model: ModelShape,
    device: DeviceSheet,
    gpus: int,
    *,
    slowness: float = 1.0,
    sequences: int = 1024,
    layer_s: float = _LAYER_S,
    memory_share: float = 0.9,
) -> EngineProfile:
    """One engine on so many devices.

    `slowness`: see above; `layer_s`: to launch a layer's kernels, behind which the reading of weights hides;
    `memory_share`: of the devices' memory, for weights and cache.
    """
    read = slowness / (gpus * device.bandwidth * _BANDWIDTH_SHARE)  # seconds per byte
    compute = 1.0 / (gpus * device.flops * _COMPUTE_SHARE)  # seconds per operation
    launches_s = model.layers * layer_s
    costs = StepCosts(
        base_s=launches_s,
        weights_s=max(0.0, model.weights * model.weight_bytes * read - launches_s),
        experts_s=model.experts * model.weight_bytes * read,
        expert_share=model.expert_share,
        token_s=2.0 * model.active * compute,
        context_s=model.kv_bytes * read,
        pair_s=4.0 * model.layers * model.heads * model.head_dim * compute,
    )
    room = gpus * device.memory_bytes * memory_share - model.bytes
    return EngineProfile(
        name=f"{gpus}x{device.name}-{model.name}",
        model=model.name,
        device=device.name,
        gpus=gpus,
        source="roofline of the device's data sheet and the model's public configuration",
        costs=costs,
        kv=KvCapacity(tokens=int(room / model.kv_bytes)),
        sequences=sequences,
        weights_gb=model.bytes / 1e9,
    )
