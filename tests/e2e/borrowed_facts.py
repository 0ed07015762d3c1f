"""What a borrowed engine did under a budget, as JSON on stdout: in a process of its own, for the engine's is forked.

Arguments: the checkpoint to boot from; for a borrowed engine another one to install as version 5, and the page's path.
"""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ebbtide.grants import Page
from ebbtide.rollout_worker.engine import EngineRequest
from ebbtide.rollout_worker.engine.vllm.borrowed_engine import BorrowedEngine
from ebbtide.rollout_worker.engine.vllm.vllm_engine import VllmEngine
from ebbtide.types.grants import Budget
from tests.e2e.engine_facts import PROMPTS, SETTINGS, Asker, Facts
from tests.support.waiting import wait_until

STEP_TOKENS = 64
SLOTS = 16
STOPS = 40
#: Enough steps for all stops, which take some more each on a busy machine; the longest prompt has 300 tokens.
LENGTH = 200
EVER = 1e9
FULL = Budget(STEP_TOKENS, SLOTS, EVER)
#: Steps of an engine without a guard that are made up of the same requests: it is paused until it has them all.
ALONE = json.dumps({"max_num_batched_tokens": STEP_TOKENS, "async_scheduling": False})


class Watched:
    """A borrowed engine, and its page as its guard has it."""

    def __init__(self, engine: VllmEngine, page: Page) -> None:
        self.engine, self.page, self.asker = engine, page, Asker(engine)

    def ask(self, prompts: Sequence[Sequence[int]], **changes: Any) -> list[asyncio.Task[Facts]]:
        return [asyncio.create_task(self.asker.ask(prompt, **changes)) for prompt in prompts]

    async def queued(self, count: int) -> None:
        """Wait until the engine knows so many requests, and stands still."""
        await wait_until(lambda: sum((self.page.steps().running, self.page.steps().waiting)) >= count)

    async def reclaim(self) -> tuple[float, float]:
        """Take the budget away: seconds until the last step's end, and from the taking to that step's beginning."""
        self.page.write_budget(Budget())
        taken = time.monotonic()
        await wait_until(lambda: not self.page.steps().stepping, interval=0.0002)
        steps = self.page.steps()
        return max(0.0, steps.ended - taken), steps.began - taken

    async def steps(self, more: int) -> None:
        goal = self.page.steps().steps + more
        await wait_until(lambda: self.page.steps().steps >= goal, interval=0.0005)


async def standing(watched: Watched) -> Facts:
    """Requests come, and no budget."""
    page, pid = watched.page, watched.page.steps().pid
    await watched.queued(len(PROMPTS))
    made, used, begun = page.steps().steps, processor_s(pid), time.monotonic()
    await wait_until(lambda: time.monotonic() - begun > 2.0)
    share = (processor_s(pid) - used) / (time.monotonic() - begun)
    begun = time.monotonic()
    await watched.engine.pause("test")
    paused_s = time.monotonic() - begun
    await watched.engine.resume("test")
    return {"steps": page.steps().steps - made, "share": share, "paused_s": paused_s}


async def stopped(watched: Watched) -> Facts:
    """The same requests, stopped and continued many times."""
    page, late, reclaims, began = watched.page, [], [], []
    boot = page.steps()
    for _ in range(STOPS):
        given = time.monotonic()
        page.write_budget(FULL)
        await watched.steps(2)
        began.append(time.monotonic() - given)
        took, behind = await watched.reclaim()
        reclaims.append(took)
        late.append(behind)
        made = page.steps()
        assert page.await_budget(0.002) == Budget()
        now = page.steps()  # what runs and waits is told a moment after a step's end
        assert (now.steps, now.scheduled, now.busy_s) == (made.steps, made.scheduled, made.busy_s)
    steps = page.steps()
    mean_step = (steps.busy_s - boot.busy_s) / (steps.steps - boot.steps)
    return {"reclaims": reclaims, "late": late, "two_steps": began, "mean_step": mean_step}


async def shared(watched: Watched) -> Facts:
    """A budget that is too small for all that run: tokens of each request after a while."""
    page = watched.page
    got = [0] * 8
    page.write_budget(FULL)
    tasks = [asyncio.create_task(_count(watched, number, got)) for number in range(8)]
    await wait_until(lambda: min(got) > 0)
    await watched.reclaim()
    page.write_budget(Budget(3, 3, EVER))
    before, scheduled, steps = list(got), page.steps().scheduled, page.steps().steps
    await watched.steps(80)
    await watched.reclaim()
    made = page.steps()
    await wait_until(lambda: sum(got) - sum(before) >= made.scheduled - scheduled - 8)
    gained = [after - since for after, since in zip(got, before, strict=True)]
    page.write_budget(FULL)
    await asyncio.gather(*tasks)
    return {"gained": gained, "a_step": (made.scheduled - scheduled) / (made.steps - steps)}


async def _count(watched: Watched, number: int, got: list[int]) -> None:
    request = EngineRequest(
        request_id=f"shared{number}",
        token_ids=PROMPTS[number],
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        max_tokens=200,
        min_tokens=0,
        stop_token_ids=(),
    )
    async for delta in watched.engine.generate(request):
        got[number] += len(delta.ids)


async def updated(watched: Watched, weights: Path) -> Facts:
    """Weights installed while requests stand still in their middle."""
    watched.page.write_budget(FULL)
    tasks = watched.ask(PROMPTS[:4], max_tokens=200)
    await watched.steps(20)
    await watched.reclaim()
    begun = time.monotonic()
    await watched.engine.install(5, weights)
    took, made = time.monotonic() - begun, watched.page.steps().steps
    watched.page.write_budget(FULL)
    return {"install_s": took, "in_flight": [await task for task in tasks], "steps": made}


def processor_s(pid: int) -> float:
    """Processor time of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


async def borrowed(checkpoint: str, other: str, path: str) -> Facts:
    page = BorrowedEngine(Path(path), STEP_TOKENS)
    engine = VllmEngine(checkpoint, SLOTS, SETTINGS, page)
    try:
        await engine.start()
        watched = Watched(engine, page.page)
        boot = page.page.steps()
        facts: Facts = {"boot": [boot.steps, boot.kv_total > 0, boot.block_bytes > 0, page.page.budget().tokens]}
        page.page.renew(EVER)
        tasks = watched.ask(PROMPTS, max_tokens=LENGTH)
        facts["standing"] = await standing(watched)
        facts["stopped"] = await stopped(watched)
        page.page.write_budget(FULL)
        facts["outputs"] = [await task for task in tasks]
        facts["shared"] = await shared(watched)
        facts["updated"] = await updated(watched, Path(other) / "model.safetensors")
        return facts
    finally:
        await engine.stop()


async def alone(checkpoint: str) -> Facts:
    engine = VllmEngine(checkpoint, SLOTS, replace(SETTINGS, engine_args=ALONE))
    try:
        await engine.start()
        asker = Asker(engine)
        await engine.pause("test")
        known = engine._llm.output_processor.request_states  # nothing else tells what vLLM has taken
        tasks = [asyncio.create_task(asker.ask(prompt, max_tokens=LENGTH)) for prompt in PROMPTS]
        await wait_until(lambda: len(known) == len(PROMPTS))
        await engine.resume("test")
        return {"outputs": [await task for task in tasks]}
    finally:
        await engine.stop()


if __name__ == "__main__":
    found = asyncio.run(borrowed(*sys.argv[1:]) if len(sys.argv) > 2 else alone(*sys.argv[1:]))
    print(json.dumps(found))  # noqa: T201 - the test reads it
