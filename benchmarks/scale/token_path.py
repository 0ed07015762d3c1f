"""What tokens cost at a high rate, and how soon they are acknowledged, beside raw pipelined Redis.

The load is that of the migration benchmark, and nothing measures the coordinator from inside. After each window raw
pipelined Redis has one of its own, on the same machine and while the load goes on.
"""

import asyncio
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from benchmarks.control_plane.house import ROOT, House, code_of
from benchmarks.control_plane.level import ControlPlaneLevel, Load
from benchmarks.scale.plan import ScalePlan

_ROLLOUTS: Final = 64
#: Rollouts end, begin and are placed while windows are measured: the first ones end after some seconds only.
_SETTLE_S: Final = 8.0


async def measure_tokens(plan: ScalePlan, checkout: Path | None, tell: Callable[[str], None]) -> dict[str, Any]:
    """CPU seconds of coordinator and Redis per million tokens, and the p99 of acknowledgements: medians of windows."""
    load = Load(workers=plan.token_workers, rollouts=_ROLLOUTS, rate=plan.token_rate)
    level = ControlPlaneLevel(load, tell, House(code_of(checkout or ROOT)))
    windows, raws = [], []
    async with level.filled() as driver:
        await asyncio.sleep(_SETTLE_S)
        for _ in range(plan.token_windows):
            windows.append(seen := await level.window(plan.token_window_s))
            raws.append(raw := await _raw(load, plan.token_window_s))
            tell(f"tokens: p99 {seen['ack_p99_ms']} ms, raw Redis {raw['pipeline']['p99_ms']} ms")
        lost = driver.lost_tokens
    cpu = [one["coordinator_cpu_s_per_mtok"] + one["redis_cpu_s_per_mtok"] for one in windows]
    return {
        "cpu_s_per_million_tokens": _median(cpu),
        "coordinator_cpu_s_per_million_tokens": _median([one["coordinator_cpu_s_per_mtok"] for one in windows]),
        "redis_cpu_s_per_million_tokens": _median([one["redis_cpu_s_per_mtok"] for one in windows]),
        "ack_p50_ms": _median([one["ack_p50_ms"] for one in windows]),
        "ack_p99_ms": _median([one["ack_p99_ms"] for one in windows]),
        "ack_p99_windows_ms": [one["ack_p99_ms"] for one in windows],
        "ack_tail_over_raw_redis": _second_worst(
            [one["ack_p99_ms"] / raw["pipeline"]["p99_ms"] for one, raw in zip(windows, raws, strict=True)]
        ),
        "raw_redis_p99_ms": _median([one["pipeline"]["p99_ms"] for one in raws]),
        "raw_redis_cpu_s_per_million_tokens": _median([one["cpu_s_per_mtok"] for one in raws]),
        "token_path_tokens_per_s": _median([one["tokens_per_s"] for one in windows]),
        "token_path_tokens_lost": lost,
    }


async def _raw(load: Load, seconds: float) -> dict[str, Any]:
    words = (str(load.rate), str(seconds), str(load.workers * load.rollouts))
    command = [sys.executable, "-m", "benchmarks.control_plane.raw", *words]
    done = await asyncio.to_thread(subprocess.run, command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _second_worst(values: list[float]) -> float:
    """One window may be the machine's fault."""
    return round(sorted(values)[-2:][0], 2)


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 3)
