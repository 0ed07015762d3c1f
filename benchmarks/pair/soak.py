"""Hours of replay under our guard: whether its memory, the worker's, or what users notice drifts."""

import asyncio
from typing import Any, Final

import psutil
from msgspec import Struct

from benchmarks.pair.figures import Cell, percentile
from benchmarks.pair.level import Measuring, Scene, slo_of
from benchmarks.pair.stack import WORKER, Pair
from ebbtide.cli.coserving_traffic import Request

_SAMPLE_S: Final = 30.0
_QUARTERS: Final = 4


class Sizes(Struct, frozen=True):
    """Resident bytes."""

    guard: int
    worker: int


async def soak(pair: Pair, measuring: Measuring, scene: Scene, seconds: float, extra: dict[str, str]) -> dict[str, Any]:
    """Replay `scene` over and over for `seconds` beside rollouts. Sizes at the begin (after a sixth, for what is learnt
    and cached grows at first) and at the end, and p99 of each quarter."""
    alone = Cell(policy="alone", blocks=[await measuring.block(scene, scene.requests, "alone")])
    span = scene.requests[-1].at + 1.0
    laps = max(1, round(seconds / span))
    requests = [Request(one.at + lap * span, one.prompt, one.output) for lap in range(laps) for one in scene.requests]
    sizes: list[Sizes] = []
    sampling = asyncio.create_task(_sample(pair, sizes))
    try:
        block = await measuring.block(scene, requests, "ours", slo_of(alone), extra)
    finally:
        sampling.cancel()
    quarter = max(1, len(block.answers) // _QUARTERS)
    parts = [
        Cell(policy="ours", blocks=[type(block)(policy="ours", seconds=1.0, answers=block.answers[at : at + quarter])])
        for at in range(0, quarter * _QUARTERS, quarter)
    ]
    settled = sizes[len(sizes) // 6] if sizes else Sizes(0, 0)
    return {
        "seconds": block.seconds,
        "requests": len(block.answers),
        "failed": sum(bool(one.failed) for one in block.answers),
        "ttft_p99_ms_by_quarter": [1e3 * percentile(part.ttft, 99) for part in parts],
        "tpot_p99_ms_by_quarter": [1e3 * percentile(part.tpot, 99) for part in parts],
        "guard_mib": [settled.guard >> 20, (sizes[-1].guard if sizes else 0) >> 20],
        "worker_mib": [settled.worker >> 20, (sizes[-1].worker if sizes else 0) >> 20],
        "rollout_tokens_per_s": block.harvested / block.seconds,
    }


async def _sample(pair: Pair, sizes: list[Sizes]) -> None:
    while True:
        await asyncio.sleep(_SAMPLE_S)
        if pair.guard_pid:
            sizes.append(Sizes(_resident(pair.guard_pid), _resident(pair.cluster.pid(WORKER))))


def _resident(pid: int) -> int:
    """Of a process and all below it."""
    top = psutil.Process(pid)
    return sum(process.memory_info().rss for process in [top, *top.children(recursive=True)])
