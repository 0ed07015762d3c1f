"""Hours of replay under our guard: whether its memory, the worker's, or what users notice drifts."""

import asyncio
from collections.abc import Iterator
from typing import Any, Final

import psutil
from msgspec import Struct

from benchmarks.pair.figures import Alone, Cell, percentile, row
from benchmarks.pair.level import Measuring, Scene, slo_of
from benchmarks.pair.stack import WORKER, Pair
from ebbtide.cli.coserving_traffic import Request

_SAMPLE_S: Final = 30.0
_QUARTERS: Final = 4


class Sizes(Struct, frozen=True):
    """Resident bytes."""

    guard: int
    worker: int


async def soak(
    pair: Pair, measuring: Measuring, scene: Scene, rollouts: Alone, seconds: float, extra: dict[str, str]
) -> dict[str, Any]:
    """Replay `scene` over and over for `seconds` beside rollouts, behind one replay alone. Sizes at the begin (after a
    sixth, for what is learnt and cached grows at first) and at the end, p99 of each quarter, and the figures of `row`,
    whose intervals are those of the first replay."""
    alone = Cell(policy="alone", blocks=[await measuring.block(scene, scene.requests, "alone")])
    requests = list(_lasting(scene, seconds))
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
    return row(Cell(policy="ours", blocks=[block]), [alone], rollouts) | {
        "ttft_p99_ms_by_quarter": [1e3 * percentile(part.ttft, 99) for part in parts],
        "tpot_p99_ms_by_quarter": [1e3 * percentile(part.tpot, 99) for part in parts],
        "guard_mib": [settled.guard >> 20, (sizes[-1].guard if sizes else 0) >> 20],
        "worker_mib": [settled.worker >> 20, (sizes[-1].worker if sizes else 0) >> 20],
    }


def _lasting(scene: Scene, seconds: float) -> Iterator[Request]:
    """The scene's requests lap after lap, up to `seconds`."""
    span = scene.requests[-1].at + 1.0
    for lap in range(1 + int(seconds / span)):
        for one in scene.requests:
            if (at := one.at + lap * span) <= seconds:
                yield Request(at, one.prompt, one.output)


async def _sample(pair: Pair, sizes: list[Sizes]) -> None:
    while True:
        await asyncio.sleep(_SAMPLE_S)
        if pair.guard_pid:
            sizes.append(Sizes(_resident(pair.guard_pid), _resident(pair.cluster.pid(WORKER))))


def _resident(pid: int) -> int:
    """Of a process and all below it."""
    top = psutil.Process(pid)
    return sum(process.memory_info().rss for process in [top, *top.children(recursive=True)])
