"""Makes engines of papers' models on papers' devices: the product's roofline with efficiencies of its own.

`engines/roofline.py` has efficiencies that are fitted to one engine's published steps. Here one setting of each paper
stands for its engine, and is fitted to that paper alone: how much slower the papers' engines are than large kernels no
paper states. `slowness` multiplies all costs but those of computing.
"""

from typing import Final

from msgspec.structs import replace

from ebbtide.simulator.engines.engine_profile import EngineDelays, EngineProfile
from ebbtide.simulator.engines.roofline import DeviceSheet, Efficiencies, ModelShape, roofline_engine

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
    """One engine on so many devices, which computes at the rate of bf16 whatever its weights are stored in.

    `slowness`: see above; `layer_s`: to launch a layer's kernels, behind which the reading of weights hides;
    `memory_share`: of the devices' memory, for weights and cache.
    """
    reads = _BANDWIDTH_SHARE / slowness
    computes = _COMPUTE_SHARE * model.weight_bytes / 2
    efficiency = Efficiencies(
        base_s=model.layers * layer_s,
        weights=reads,
        contexts=reads,
        decode=computes,
        exchange_s=0.0,
        prefill=computes,
        memory=memory_share,
    )
    engine = roofline_engine(model, device, gpus, efficiency=efficiency)
    costs = replace(engine.costs, weights_s=max(0.0, engine.costs.weights_s - engine.costs.base_s))
    return replace(engine, costs=costs, sequences=sequences, delays=EngineDelays())
