"""Boot, one undisturbed response to each prompt, then kills until enough, and the comparison."""

import asyncio
import tempfile
import time
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from random import Random
from typing import Any, Final

from safetensors.numpy import load_file

from benchmarks.real_kills.figures import gather
from benchmarks.real_kills.fleet import WORKERS, Fleet
from benchmarks.real_kills.rollouts import RUN, Rollouts, rollouts
from ebbtide.client import Client
from tests.chaos.cluster import Cluster

#: Kills and tokens of a response, in full and in short.
_FULL: Final = (30, 192)
_QUICK: Final = (4, 128)
PROMPTS: Final = 64


def run_level(
    *,
    quick: bool = False,
    kills: int = 0,
    prompts: int = PROMPTS,
    length: int = 0,
    seed: int = 0,
    directory: Path | None = None,
    notify: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Three real engines killed `kills` times (0: 30, or 4 if `quick`); see `figures.gather` for what comes back.

    About 90 s if quick, on two cores; else as long as so many replacements take to boot. `notify` is told in a line how
    far it is. Logs stay in `directory`, if one is given. Call it from the main thread, outside of an event loop.
    """
    default_kills, default_length = _QUICK if quick else _FULL
    with tempfile.TemporaryDirectory(prefix="ebb-kills-") as temporary:
        work = _run(
            directory or Path(temporary),
            kills=kills or default_kills,
            prompts=prompts,
            length=length or default_length,
            seed=seed,
            notify=notify,
        )
        return {**asyncio.run(work), "quick": quick, "seed": seed}


async def _run(
    directory: Path, *, kills: int, prompts: int, length: int, seed: int, notify: Callable[[str], None]
) -> dict[str, Any]:
    cluster, began = Cluster(directory), time.monotonic()
    fleet = Fleet(cluster)
    try:
        client, weights = await fleet.boot()
        notify(f"three engines booted in {time.monotonic() - began:.0f} s")
        await client.submit({"name": "kills", "model": "random", "environment": {"name": "none"}}, RUN)
        async with client.claim(RUN, holder="benchmark") as lease:
            await lease.publish(load_file(weights / "model.safetensors"), step=0)
            async with rollouts(client, lease, prompts=prompts, length=length, seed=seed) as asked:
                await asked.one_of_each()
                calm = (await client.run(RUN)).counters["attempts"]
                notify(f"{prompts} undisturbed responses of {length} tokens in {calm} attempts")
                await _disturb(fleet, client, asked, kills, Random(seed), notify)
                figures = gather(fleet, asked, await _spans(client))
    finally:
        await cluster.close()
    return {**figures, "undisturbed_attempts": calm, "wall_s": time.monotonic() - began}


async def _disturb(
    fleet: Fleet, client: Client, asked: Rollouts, kills: int, random: Random, notify: Callable[[str], None]
) -> None:
    """Wave after wave; in each all workers but one are killed at random moments, and replaced before the next."""
    while (missing := kills - len(fleet.kills)) > 0:
        await fleet.refill()
        await fleet.serving(client)
        async with asyncio.TaskGroup() as group, asyncio.timeout(300):
            killing = group.create_task(_kill(fleet, min(missing, WORKERS - 1), random))
            while not killing.done():  # a survivor may outpace the next victim, which needs work to be killed at
                await asked.one_of_each()
        notify(f"{len(fleet.kills)} workers killed")


async def _kill(fleet: Fleet, count: int, random: Random) -> None:
    for _ in range(count):
        await fleet.kill(random)


async def _spans(client: Client) -> list[Any]:
    async with aclosing(client.timeline(RUN)) as spans:
        return [span async for span in spans]
