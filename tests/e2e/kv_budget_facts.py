"""What a real engine did whose keys and values were cut again and again, as JSON on stdout: run in a process of its
own, for the engine's processes are forked from it. Arguments: a checkpoint, and the path of a page of grants."""

import asyncio
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from ebbtide.grants import Page
from ebbtide.rollout_worker.engine import EngineRequest
from ebbtide.rollout_worker.engine.vllm.borrowed_engine import BorrowedEngine
from ebbtide.rollout_worker.engine.vllm.vllm_engine import VllmEngine
from ebbtide.rollout_worker.guard_link import WeightSleep
from ebbtide.rollout_worker.settings import VllmSettings
from ebbtide.types.grants import Budget, Residency
from tests.support.waiting import wait_until

SETTINGS = VllmSettings(dtype="float32", max_model_len=512, enforce_eager=True, threads=1, kv_cache_mib=64)
#: Some of them begin alike, by a whole block.
SHARED = [(5 * i) % 113 for i in range(130)]
PROMPTS = [[20 + i, 21, 22, 23 + i] for i in range(8)] + [[*SHARED, 30 + i, 31] for i in range(4)]
LENGTH = 300
Facts = dict[str, Any]


class SleepingBorrowed(BorrowedEngine):
    """An engine that is told to sleep as on a GPU, where vLLM's CPU build only pauses and drops its cache."""

    as_on_gpu = False

    @property
    def sleeps(self) -> bool:
        return self.as_on_gpu


async def stands_still(page: Page, seconds: float = 0.2) -> bool:
    """Whether the engine makes no step for so long. Only time that passes can show it: there is nothing to wait for."""
    before = page.steps().steps
    await asyncio.sleep(seconds)
    return page.steps().steps == before


class Asker:
    def __init__(self, engine: VllmEngine) -> None:
        self._engine, self._asked = engine, 0

    async def ask(self, ids: list[int]) -> Facts:
        self._asked += 1
        request = EngineRequest(
            request_id=f"r{self._asked}",
            token_ids=ids,
            temperature=0.0,
            top_p=1.0,
            top_k=0,
            max_tokens=LENGTH,
            min_tokens=0,
            stop_token_ids=(),
        )
        out: Facts = {"ids": [], "logprobs": [], "finish": None}
        async for delta in self._engine.generate(request):
            out["ids"] += delta.ids
            out["logprobs"] += delta.logprobs
            out["finish"] = delta.finish
        return out

    async def ask_all(self) -> list[Facts]:
        return await asyncio.gather(*(self.ask(prompt) for prompt in PROMPTS))


class Keeper:
    """Stands in for guard and worker: budget and lease for as long as it lives."""

    def __init__(self, borrowed: BorrowedEngine) -> None:
        self.page = borrowed.page

    def grant(self, *, tokens: int = 256) -> None:
        until = time.monotonic() + 300
        self.page.write_budget(Budget(tokens, 16, until))
        self.page.renew(until)

    async def cut(self, blocks: int) -> float:
        """Seconds until no more than `blocks` are in use."""
        self.limit(blocks)
        start = time.monotonic()
        await wait_until(lambda: self.page.steps().kv_used <= blocks, interval=0.001)
        return time.monotonic() - start

    def limit(self, blocks: int) -> None:
        self.page.limit_kv(blocks)
        # One step may be fitted to what held before and is counted as the next but one if another was about to end.
        # What a step uses is told behind its count: the third is counted when the second has told.
        self._obeyed = self.page.steps().steps + 3

    @property
    def over(self) -> bool:
        """Whether a step that began behind the cut used more than it allows."""
        steps = self.page.steps()
        return steps.steps >= self._obeyed and 0 <= self.page.kv_blocks < steps.kv_used


async def cut_at_random(keeper: Keeper, running: asyncio.Task[list[Facts]], seed: int) -> Facts:
    generator, times, cuts, over = random.Random(seed), [], [], 0
    while not running.done():
        blocks = generator.choice([0, 3, 5, 8, 12, 20])
        times.append(await keeper.cut(blocks))
        cuts.append(blocks)
        end = time.monotonic() + generator.uniform(0.02, 0.3)
        while time.monotonic() < end and not running.done():
            over += keeper.over
            await asyncio.sleep(0.002)
        if generator.random() < 0.3:
            keeper.page.limit_kv(-1)
            await asyncio.sleep(0.05)
    keeper.page.limit_kv(-1)
    return {"cuts": cuts, "seconds": times, "over": over, "answers": await running}


class Mirror:
    """Stands in for the installer: the checkpoint is the version that the engine serves."""

    def __init__(self, engine: VllmEngine, weights: Path) -> None:
        self.engine, self.weights = engine, weights

    def rest(self) -> bool:
        return True

    async def restore(self) -> None:
        await self.engine.install(1, self.weights)


async def move_weights(engine: VllmEngine, keeper: Keeper, asker: Asker, checkpoint: Path) -> Facts:
    """Cache and weights away and back, with requests under way and then without any."""
    sleeping = WeightSleep(engine, Mirror(engine, checkpoint / "model.safetensors"))  # type: ignore[arg-type]
    running = asyncio.create_task(asker.ask_all())
    await wait_until(lambda: keeper.page.steps().running > 8)
    seen = [resident(keeper.page)]
    for level in (Residency.HOST, Residency.AWAY):
        keeper.page.limit_kv(0)
        await sleeping.be(level)
        seen.append(resident(keeper.page))
    before = keeper.page.steps()
    still = await stands_still(keeper.page)
    await sleeping.be(Residency.AWAKE)
    keeper.page.limit_kv(-1)
    found = {"answers": await running, "resident": seen, "still": still, "used": before.kv_used}
    idle = resident(keeper.page)
    keeper.page.limit_kv(0)
    await sleeping.be(Residency.HOST)
    host = resident(keeper.page)
    await sleeping.be(Residency.AWAKE)
    keeper.page.limit_kv(-1)
    return {
        **found,
        "idle_used": keeper.page.steps().kv_used,
        "idle_freed": idle - host,
        "after": await asker.ask_all(),
        "wake_s": [sleeping.wake_host_s, sleeping.wake_away_s],
    }


async def sleep_and_wake(engine: VllmEngine, keeper: Keeper, asker: Asker, checkpoint: Path) -> Facts:
    """Both levels of vLLM's sleep, with requests under way, a pause for another reason, and an install at the first."""
    found: Facts = {"levels": []}
    for level in (Residency.HOST, Residency.AWAY):
        sleeping = WeightSleep(engine, Mirror(engine, checkpoint / "model.safetensors"))  # type: ignore[arg-type]
        running = asyncio.create_task(asker.ask_all())
        await wait_until(lambda: keeper.page.steps().running > 8)
        await sleeping.be(level)
        before = keeper.page.steps()
        await engine.pause("throttle")
        await engine.resume("throttle")  # an engine that sleeps does not go on for that
        installing = None
        if level is Residency.HOST:
            installing = asyncio.create_task(engine.install(2, checkpoint / "model.safetensors"))
        still = await stands_still(keeper.page) and (installing is None or not installing.done())
        await engine.pause("throttle")
        await sleeping.be(Residency.AWAKE)
        if installing is not None:
            await installing
        await asyncio.sleep(0.1)
        held = await stands_still(keeper.page)
        await engine.resume("throttle")
        facts = {"still": still, "held": held, "running": before.running, "used": before.kv_used}
        found["levels"].append({**facts, "answers": await running})
    return found


def resident(page: Any) -> int:
    return int(psutil.Process(page.steps().pid).memory_info().rss)


async def main(checkpoint: str, path: str) -> None:
    borrowed = SleepingBorrowed(Path(path), 256)
    engine = VllmEngine(checkpoint, 16, SETTINGS, borrowed)
    facts: Facts = {}
    try:
        await engine.start()
        keeper, asker = Keeper(borrowed), Asker(engine)
        keeper.grant()
        facts["total"] = borrowed.page.steps().kv_total
        facts["block_bytes"] = borrowed.page.steps().block_bytes
        facts["whole"] = await asker.ask_all()
        facts["recomputed_uncut"] = borrowed.page.steps().recomputed
        # Nothing fits, then one at a time does.
        stuck = asyncio.create_task(asker.ask_all())
        await wait_until(lambda: borrowed.page.steps().running > 8)
        await keeper.cut(0)
        steps = borrowed.page.steps()
        cpu = psutil.Process(steps.pid).cpu_times().user
        still = await stands_still(borrowed.page, 0.5)
        after = borrowed.page.steps()
        facts["starved"] = {
            "still": still,
            "running": after.running,
            "waiting": after.waiting,
            "cpu": psutil.Process(steps.pid).cpu_times().user - cpu,
        }
        borrowed.page.limit_kv(4)
        facts["one_by_one"] = await stuck
        borrowed.page.limit_kv(-1)
        before = borrowed.page.steps().recomputed
        facts["runs"] = [await cut_at_random(keeper, asyncio.create_task(asker.ask_all()), seed) for seed in range(3)]
        facts["recomputed"] = borrowed.page.steps().recomputed - before
        # A cut while the engine stands still.
        running = asyncio.create_task(asker.ask_all())
        await wait_until(lambda: borrowed.page.steps().running > 8)
        borrowed.page.write_budget(Budget())
        used, before = borrowed.page.steps().kv_used, resident(borrowed.page)
        facts["standing"] = {"used": used, "seconds": await keeper.cut(2)}
        facts["freed_bytes"] = before - resident(borrowed.page)
        keeper.grant()
        keeper.page.limit_kv(-1)
        facts["after_standing"] = await running
        facts["residency"] = await move_weights(engine, keeper, asker, Path(checkpoint))
        borrowed.as_on_gpu = True
        facts["sleep"] = await sleep_and_wake(engine, keeper, asker, Path(checkpoint))
        facts["used_at_end"] = borrowed.page.steps().kv_used
        print(json.dumps(facts))  # noqa: T201 - the test reads it
    finally:
        await engine.stop()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
