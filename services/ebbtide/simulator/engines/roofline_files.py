"""Writes the profiles that come with the simulator: `python -m ebbtide.simulator.engines.roofline_files`.

Each line that is derived says how, and where its numbers are from.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from ebbtide.simulator.engines import known_hardware as known
from ebbtide.simulator.engines.engine_profile import EngineProfile
from ebbtide.simulator.engines.profile_files import write_profile
from ebbtide.simulator.engines.roofline import (
    FITTED,
    DeviceSheet,
    ModelShape,
    roofline_engine,
    roofline_trainer,
)
from ebbtide.simulator.engines.trainer_profile import TrainerProfile

_FOLDER: Final = Path(__file__).with_name("profiles")


class _Engine(NamedTuple):
    model: ModelShape
    device: DeviceSheet
    gpus: int
    replicas: int = 1
    exchange_s: float | None = None


_ENGINES: Final = (
    # RLBoost's spot instances have two H100; one and four are for comparison.
    *(_Engine(known.QWEN3_8B, known.H100, gpus) for gpus in (1, 2)),
    *(_Engine(known.QWEN3_14B, known.H100, gpus) for gpus in (1, 2)),
    *(_Engine(known.QWEN3_32B, known.H100, gpus) for gpus in (2, 4)),
    *(_Engine(known.QWEN3_30B_A3B, known.H100, gpus) for gpus in (1, 2)),
    # ROSE: Qwen3-8B on one H800, Qwen3-32B on four, beside served Qwen2.5-7B and 32B.
    _Engine(known.QWEN3_8B, known.H800, 1),
    _Engine(known.QWEN3_32B, known.H800, 4),
    # RollPacker: 7B on one, 14B and 32B on two H800; its planner doubles them.
    *(_Engine(known.QWEN25_7B, known.H800, gpus) for gpus in (1, 2)),
    *(_Engine(known.QWEN25_14B, known.H800, gpus) for gpus in (2, 4)),
    *(_Engine(known.QWEN25_32B, known.H800, gpus) for gpus in (2, 4)),
    # Seer: one H800, eight, and 32 with data parallel attention.
    _Engine(known.MOONLIGHT, known.H800, 1),
    _Engine(known.QWEN2_VL_72B, known.H800, 8),
    _Engine(known.KIMI_K2, known.H800, 32, replicas=32, exchange_s=known.DEEP_EP_32_S),
)
_TRAINERS: Final = (
    (known.QWEN3_8B, known.H100, 8),
    (known.QWEN3_14B, known.H100, 8),
    (known.QWEN3_32B, known.H100, 16),
    (known.QWEN3_8B, known.H800, 8),
    (known.QWEN3_32B, known.H800, 32),
    (known.QWEN25_7B, known.H800, 16),
    (known.QWEN25_14B, known.H800, 32),
    (known.QWEN25_32B, known.H800, 64),
)


def write_profiles(folder: Path) -> None:
    """Writes all derived profiles into `folder`, engines and trainers apart."""
    for kind, profiles in (("engines", _engines()), ("trainers", _trainers())):
        (folder / kind).mkdir(parents=True, exist_ok=True)
        for profile, notes in profiles:
            write_profile(profile, folder / kind / f"{profile.name}.toml", notes)


def _engines() -> Iterator[tuple[EngineProfile, Mapping[str, str]]]:
    for model, device, gpus, replicas, exchange_s in _ENGINES:
        profile = roofline_engine(model, device, gpus, replicas=replicas, exchange_s=exchange_s)
        yield profile, _engine_notes(model, device, gpus, replicas, exchange_s)


def _trainers() -> Iterator[tuple[TrainerProfile, Mapping[str, str]]]:
    for model, device, gpus in _TRAINERS:
        yield roofline_trainer(model, device, gpus), _trainer_notes(model, device, gpus)


def _engine_notes(
    model: ModelShape, device: DeviceSheet, gpus: int, replicas: int, exchange_s: float | None
) -> Mapping[str, str]:
    fit, size = FITTED, f"{model.weight_bytes:g} bytes"
    read = f"({gpus} GPUs x {device.bandwidth:.3g} B/s, data sheet, x {fit.weights:g}, fitted)"
    rate = f"({gpus} GPUs x {device.flops * 2 / model.weight_bytes:.3g}/s, data sheet)"
    layer_s, exchanges = f"2 x {fit.exchange_s:g} s (fitted)" if gpus > 1 else "0 s (one GPU)", f"{model.layers} layers"
    if exchange_s is not None:
        layer_s = f"{exchange_s:g} s (DeepEP README, 155 us + 273 us)"
    pair = f"4 operations x {model.layers} layers x {model.heads} heads x {model.head_dim} (config.json)"
    reserved = f"{replicas} x {model.weights:.4g} + {model.experts:.4g} weights x {size}"
    notes = {
        "costs.base_s": f"{fit.base_s:g} s of every step (fitted) + {exchanges} x {layer_s}",
        "costs.weights_s": f"{replicas} x {model.weights:.4g} weights (safetensors) x {size} / {read}",
        "costs.token_s": f"2 operations x {model.active:.4g} weights of a token / {rate} / {fit.prefill:g} (assumed)",
        "costs.sequence_s": f"the same / {fit.decode:g} (fitted) instead of {fit.prefill:g}, less token_s",
        "costs.context_s": f"{model.kv_bytes} B of a token (config.json) / bandwidth x {fit.contexts:g} (fitted)",
        "costs.pair_s": f"{pair} / {rate} / {fit.prefill:g} (assumed)",
        "costs.prompt_s": "0: not published; measure it",
        "kv.tokens": f"({fit.memory:g} of {gpus} x {device.memory_bytes:.3g} B - {reserved}) / {model.kv_bytes} B",
        "delays.start_s": "0: a scenario's boot_s has it",
        "delays.admit_s": "0: not published; measure it",
        "delays.install_s_per_gb": f"{gpus} x PCIe's {device.pcie:.3g} B/s (data sheet) x {fit.pcie:g} (assumed)",
        "delays.wake_s": "all weights over PCIe",
    }
    if model.experts:
        notes["costs.experts_s"] = f"{model.experts:.4g} weights of routed experts (config.json) x {size} / {read}"
    return notes


def _trainer_notes(model: ModelShape, device: DeviceSheet, gpus: int) -> Mapping[str, str]:
    fit = FITTED
    rate = f"({device.flops:.3g}/s, data sheet, x {fit.train:g}, assumed)"
    pair = f"16 operations x {model.layers} layers x {model.heads} heads x {model.head_dim} (config.json)"
    return {
        "costs.token_s": f"8 operations (2 recompute activations) x {model.active:.4g} weights / {rate}",
        "costs.pair_s": f"{pair} / {rate}",
        "costs.update_s": f"28 B of AdamW's state x {model.weights:.4g} weights / {gpus} GPUs / bandwidth",
        "costs.forward_share": "2 of 8 operations",
        "patch_share": (
            "2 to 5 % of bf16 weights change in a step (verl#7060, vime#392); patches of 3 % are a twentieth "
            "(simulated weights)"
        ),
        "delays.snapshot_s": f"its share of the weights over PCIe: {device.pcie:.3g} B/s (data sheet) x {fit.pcie:g}",
        "delays.publish_s": "0: a scenario's links have it",
        "delays.checkpoint_s": "0: it depends on the storage; measure it",
    }


if __name__ == "__main__":
    write_profiles(_FOLDER)
