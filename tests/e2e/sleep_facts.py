"""What a real engine on a GPU gave back when it slept, and what it said after it woke, as JSON on stdout: run in a
process of its own. Arguments: a checkpoint, and the path of a page of grants."""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from ebbtide.gpu_memory import Device, open_device
from ebbtide.rollout_worker.engine.vllm.borrowed_engine import BorrowedEngine
from ebbtide.rollout_worker.engine.vllm.vllm_engine import VllmEngine
from ebbtide.rollout_worker.guard_link import WeightSleep
from ebbtide.rollout_worker.settings import VllmSettings
from ebbtide.types.grants import Residency
from tests.e2e.kv_budget_facts import Asker, Keeper, Mirror
from tests.support.waiting import wait_until

SETTINGS = VllmSettings(dtype="float32", max_model_len=512, enforce_eager=True, kv_cache_mib=1024)
#: NVML's reading is used for so long.
FRESH_S = 0.15
Facts = dict[str, Any]


async def free(device: Device) -> int:
    await asyncio.sleep(FRESH_S)
    return device.memory()[0]


async def one_sleep(
    level: Residency, engine: VllmEngine, keeper: Keeper, asker: Asker, device: Device, checkpoint: Path
) -> Facts:
    sleeping = WeightSleep(engine, Mirror(engine, checkpoint / "model.safetensors"))  # type: ignore[arg-type]
    running = asyncio.create_task(asker.ask_all())
    await wait_until(lambda: keeper.page.steps().running > 8)
    awake = await free(device)
    began = time.monotonic()
    await sleeping.be(level)
    down_s = time.monotonic() - began
    asleep = await free(device)
    began = time.monotonic()
    await sleeping.be(Residency.AWAKE)
    up_s = time.monotonic() - began
    return {
        "level": level.name.lower(),
        "freed": asleep - awake,
        "taken": asleep - await free(device),
        "down_s": down_s,
        "up_s": up_s,
        "answers": await running,
        "after": await asker.ask_all(),
    }


async def one_release(engine: VllmEngine, keeper: Keeper, asker: Asker, device: Device, checkpoint: Path) -> Facts:
    """The cache goes and comes back under requests; weights stay."""
    sleeping = WeightSleep(engine, Mirror(engine, checkpoint / "model.safetensors"))  # type: ignore[arg-type]
    running = asyncio.create_task(asker.ask_all())
    await wait_until(lambda: keeper.page.steps().running > 8)
    awake = await free(device)
    await sleeping.keep_cache(wanted=False)
    without = await free(device)
    await sleeping.keep_cache(wanted=True)
    return {"freed": without - awake, "taken": without - await free(device), "answers": await running}


async def main(checkpoint: str, path: str) -> None:
    borrowed = BorrowedEngine(Path(path), 256)
    engine = VllmEngine(checkpoint, 16, SETTINGS, borrowed)
    try:
        await engine.start()
        keeper, asker, device = Keeper(borrowed), Asker(engine), open_device(borrowed.device)
        keeper.grant()
        steps = borrowed.page.steps()
        facts: Facts = {"weights": borrowed.weights_bytes, "cache": steps.kv_total * steps.block_bytes}
        facts["whole"] = await asker.ask_all()
        levels = (Residency.HOST, Residency.AWAY, Residency.HOST)
        facts["sleeps"] = [await one_sleep(level, engine, keeper, asker, device, Path(checkpoint)) for level in levels]
        facts["release"] = await one_release(engine, keeper, asker, device, Path(checkpoint))
        print(json.dumps(facts))  # noqa: T201 - the test reads it
    finally:
        await engine.stop()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
