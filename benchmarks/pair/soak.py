"""Hours of replay under our guard: whether its memory, the worker's, or what users notice drifts."""

import asyncio
import math
from typing import Any, Final

import psutil
from msgspec import Struct

from benchmarks.pair.level import Measuring, slo_of
from benchmarks.pair.plan import Scene
from benchmarks.pair.results.figures import Alone, Block, Cell, percentile, row
from benchmarks.pair.stack import WORKER, Pair
from ebbtide.demo.coserving.request_traffic import TrafficRequest

_SAMPLE_S: Final = 30.0


class Sizes(Struct, frozen=True):
    """Resident bytes."""

    guard: int
    worker: int


async def soak(
    measuring: Measuring, scene: Scene, rollouts: Alone, seconds: float, extra: dict[str, str]
) -> dict[str, Any]:
    """Replay `scene` alone, then beside rollouts over and over, in as many whole laps as last for `seconds`. The p99 of
    each lap, the figures of `row` over all laps, and sizes at the begin (after a sixth, for what is learnt and cached
    grows at first) and at the end; None where the laps were measured by a run that was then interrupted."""
    alone = await measuring.block(scene, scene.requests, "alone")
    span = scene.requests[-1].at + 1.0
    laps = max(1, math.ceil(seconds / span))
    requests = [
        TrafficRequest(one.at + lap * span, one.prompt, one.output) for lap in range(laps) for one in scene.requests
    ]
    sizes: list[Sizes] = []
    sampling = asyncio.create_task(_sample(measuring.pair, sizes))
    try:
        slo = slo_of(Cell(policy="alone", blocks=[alone]))
        whole = await measuring.block(scene, requests, "ours", slo, extra)
    finally:
        sampling.cancel()
    parts = lapped(whole, laps)
    beside = Cell(policy="alone", blocks=[alone] * laps)
    each = [Cell(policy="ours", blocks=[part]) for part in parts]
    drift = [sizes[len(sizes) // 6], sizes[-1]] if sizes else []
    return row(Cell(policy="ours", blocks=parts), [beside], rollouts) | {
        "ttft_p99_ms_by_lap": [1e3 * percentile(part.ttft, 99) for part in each],
        "tpot_p99_ms_by_lap": [1e3 * percentile(part.tpot, 99) for part in each],
        "step_ms": 1e3 * rollouts.step_s,
        "guard_mib": [one.guard >> 20 for one in drift] or None,
        "worker_mib": [one.worker >> 20 for one in drift] or None,
    }


def lapped(whole: Block, laps: int) -> list[Block]:
    """A replay of `laps` laps as that many blocks, which share its tokens evenly. The first bears its reclaims."""
    size = len(whole.answers) // laps
    return [
        Block(
            policy=whole.policy,
            seconds=whole.seconds / laps,
            answers=whole.answers[lap * size : (lap + 1) * size],
            harvested=whole.harvested // laps,
            wasted=whole.wasted // laps,
            again=whole.again // laps,
            reclaims=whole.reclaims if lap == 0 else (0.0, 0.0, 0),
        )
        for lap in range(laps)
    ]


async def _sample(pair: Pair, sizes: list[Sizes]) -> None:
    while True:
        await asyncio.sleep(_SAMPLE_S)
        if pair.guard_pid:
            sizes.append(Sizes(_resident(pair.guard_pid), _resident(pair.cluster.pid(WORKER))))


def _resident(pid: int) -> int:
    """Of a process and all below it."""
    top = psutil.Process(pid)
    return sum(process.memory_info().rss for process in [top, *top.children(recursive=True)])
