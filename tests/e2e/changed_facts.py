"""What a real engine did that was restarted for another architecture, as JSON on stdout, in a process of its own.

Arguments: the checkpoint to begin with, and one of another architecture; with one alone, what an engine does that was
started for it in the first place.
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from ebbtide.rollout_worker.engine.changing_engine import ChangingEngine, EngineNotChanged
from ebbtide.rollout_worker.engine.vllm.vllm_engine import VllmEngine
from ebbtide.types.fleet import EngineInfo
from ebbtide.weights import read_config
from tests.e2e.engine_facts import PROMPTS, SETTINGS, Asker, Facts

VERSION = 7


def engine_for(own: Path) -> ChangingEngine:
    return ChangingEngine(lambda model: VllmEngine(str(model or own), 32, SETTINGS), 0)


async def asked(engine: Any) -> Facts:
    asker = Asker(engine)
    return {"single": await asker.ask(PROMPTS[0]), "batch": await asker.ask_all(PROMPTS[:6])}


def engine_processes() -> int:
    """Those that there are, dead ones too. What multiprocessing keeps for itself is none of them."""
    children = psutil.Process().children(recursive=True)
    return sum(
        one.status() == psutil.STATUS_ZOMBIE or "resource_tracker" not in " ".join(one.cmdline()) for one in children
    )


class Pulse:
    """How long the event loop stood still at most."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._task = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.02)
            self.longest_s = max(self.longest_s, time.monotonic() - began - 0.02)

    def stop(self) -> float:
        self._task.cancel()
        return self.longest_s


async def changed(first: Path, second: Path) -> Facts:
    engine = engine_for(first)
    info = await engine.start()
    facts: Facts = {"boot_s": engine.restart_s, "before": await asked(engine)}
    await engine.pause("store")
    weights, config = second / "model.safetensors", read_config(second)
    pulse, began = Pulse(), time.monotonic()
    other = await engine.change("another", config, weights)
    facts |= {"change_s": time.monotonic() - began, "stood_still_s": pulse.stop()}
    await engine.resume("store")
    facts["pause_s"] = await engine.install(VERSION, weights)
    facts |= {"after": await asked(engine), "infos": [vars_of(info), vars_of(other)]}
    facts["processes"] = engine_processes()
    pulse = Pulse()
    try:
        await engine.change("broken", config.replace(b"Qwen3ForCausalLM", b"NoSuchModel"), weights)
    except EngineNotChanged as error:
        facts["stood_still_again_s"] = pulse.stop()
        facts |= {"refusal": str(error), "back": vars_of(error.info), "again": await asked(engine)}
    await engine.stop()
    facts["left"] = engine_processes()
    return facts


def vars_of(info: EngineInfo) -> Facts:
    return {"model": info.model, "architecture": info.architecture, "vocab_size": info.vocab_size}


async def fresh(checkpoint: Path) -> Facts:
    engine = engine_for(checkpoint)
    await engine.start()
    await engine.install(VERSION, checkpoint / "model.safetensors")
    facts = await asked(engine)
    await engine.stop()
    return {"after": facts}


if __name__ == "__main__":
    paths = [Path(argument) for argument in sys.argv[1:]]
    facts = asyncio.run(changed(*paths) if len(paths) == 2 else fresh(*paths))
    sys.stdout.write(json.dumps(facts) + "\n")
