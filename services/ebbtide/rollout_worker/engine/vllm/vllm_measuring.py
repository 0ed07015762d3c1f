"""Boots vLLM as a worker does, and measures it."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ebbtide.errors import InvalidRequest
from ebbtide.rollout_worker.engine import checkpoint_facts
from ebbtide.rollout_worker.engine.engine_measuring import EngineMeasuring
from ebbtide.rollout_worker.engine.measured_steps import EngineMeasurements
from ebbtide.rollout_worker.engine.vllm.cpu_build import is_cpu_build
from ebbtide.rollout_worker.engine.vllm.vllm_engine import VllmEngine
from ebbtide.rollout_worker.settings import WorkerSettings

#: The number of the version that is installed after the weights were given up; rounds count from 1 on.
_AFTER_SLEEP: Final = 1 << 30


def measure_vllm(settings: WorkerSettings, *, seconds: float, tell: Callable[[str], None]) -> EngineMeasurements:
    """Measures the engine of a worker with these settings for so many seconds, its start not counted.

    Raises `InvalidRequest` for a model that it cannot boot, and `EngineFailed` if the engine fails. Called from the
    main thread, before any other one runs: the engine's process may be forked.
    """
    if settings.engine != "vllm":
        raise InvalidRequest("only vllm can be measured", field="engine")
    return asyncio.run(_measure(settings, seconds, tell))


async def _measure(settings: WorkerSettings, seconds: float, tell: Callable[[str], None]) -> EngineMeasurements:
    root = checkpoint_facts.check_directory(settings.model)
    weights = _one_file(root, tell)
    engine = VllmEngine(settings.model, settings.slots, settings.vllm)
    try:
        began = time.monotonic()
        info = await engine.start()
        start_s = time.monotonic() - began
        tell(f"started in {start_s:.1f} s")
        measuring = EngineMeasuring(engine, info, engine.capacity, tell)
        await measuring.run(seconds=seconds, weights=weights)
        sleep_s, wake_s = await _sleep(engine, weights) if weights and is_cpu_build() else (0.0, 0.0)
        return EngineMeasurements(
            device=_device(),
            capacity=engine.capacity,
            steps=tuple(measuring.steps),
            start_s=start_s,
            stop_s=tuple(measuring.stops),
            pause_s=tuple(measuring.pauses),
            sleep_s=sleep_s,
            wake_s=wake_s,
            weights_bytes=checkpoint_facts.weights_bytes(root),
        )
    finally:
        await engine.stop()


def _device() -> str:
    from vllm.platforms import current_platform

    return "" if is_cpu_build() else str(current_platform.get_device_name())


async def _sleep(engine: VllmEngine, weights: Path) -> tuple[float, float]:
    """Seconds to give up the weights' memory, and to have them back."""
    began = time.monotonic()
    await engine.give_up_weights()
    slept = time.monotonic()
    await engine.install(_AFTER_SLEEP, weights)
    return slept - began, time.monotonic() - slept


def _one_file(root: Path, tell: Callable[[str], None]) -> Path | None:
    files = sorted(root.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    tell(f"installs are not measured: the checkpoint has {len(files)} files of weights, and a version has one")
    return None
