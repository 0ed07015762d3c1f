"""What tokens cost at a high rate, and how soon they are acknowledged, beside raw pipelined Redis.

Nothing measures the coordinator from inside. After each window raw pipelined Redis has one of its own, on the same
machine and while the load goes on.
"""

import asyncio
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from benchmarks.control_plane.driver import Driver
from benchmarks.control_plane.house import ROOT, House, code_of
from benchmarks.control_plane.measures import cpu_s, percentile
from benchmarks.scale.plan import ScalePlan
from tests.support.waiting import wait_until

_ROLLOUTS: Final = 64
#: Slots filled: the rest is free, so that a placement never waits for one.
_FILLED: Final = 0.95
#: Until the first rollout may end, once all generate.
_SPARED_S: Final = 7.0
#: Of the rate, while rollouts are placed: the few that are there first are not to make all the tokens.
_SLOW: Final = 0.02
#: Answers are prompt again after a rush.
_PROMPT_MS: Final = 50.0
#: Rollouts end, begin and are placed while windows are measured: the first ones end after some seconds only.
_SETTLE_S: Final = 8.0


async def measure_tokens(plan: ScalePlan, checkout: Path | None, tell: Callable[[str], None]) -> dict[str, Any]:
    """CPU seconds of coordinator and Redis per million tokens, and the p99 of acknowledgements: medians of windows."""
    windows, raws = [], []
    async with House(code_of(checkout or ROOT)) as house:
        spared = round(_SPARED_S * plan.token_rate / (plan.token_workers * _ROLLOUTS * _FILLED))
        load = _Load(house, Driver(house.address, house.token, spared=spared), plan, tell)
        try:
            await load.fill()
            await asyncio.sleep(_SETTLE_S)
            for _ in range(plan.token_windows):
                windows.append(seen := await load.window(plan.token_window_s))
                raws.append(raw := await _raw(plan))
                tell(f"tokens: p99 {seen['ack_p99_ms']} ms, raw Redis {raw['pipeline']['p99_ms']} ms")
            lost = load.driver.lost_tokens
        finally:
            await load.driver.close()
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


class _Load:
    """Workers whose slots are filled, and which generate at the plan's rate."""

    def __init__(self, house: House, driver: Driver, plan: ScalePlan, tell: Callable[[str], None]) -> None:
        self._house, self.driver, self._plan, self._tell = house, driver, plan, tell

    async def fill(self) -> None:
        plan = self._plan
        await self.driver.start()
        await self._house.fleet("pace", rate=plan.token_rate * _SLOW)
        await self._house.fleet("open", workers=plan.token_workers, slots=_ROLLOUTS)
        want = int(plan.token_workers * _ROLLOUTS * _FILLED)
        self.driver.want(want)

        async def filled() -> bool:
            self.driver.check()
            return bool((await self._house.fleet("measure"))["running"] >= want * 0.98)

        async def prompt() -> bool:
            """The rush is over: what had piled up is stored."""
            answers = (await self._house.fleet("measure"))["answers"]
            return bool(answers) and percentile(answers, 0.5) * 1e3 < _PROMPT_MS

        await wait_until(filled, timeout=180, interval=0.5, what="all rollouts placed")
        await self._house.fleet("pace", rate=plan.token_rate)
        await wait_until(prompt, timeout=60, interval=0.5, what="prompt answers")
        self._tell(f"{want} rollouts on {plan.token_workers} workers")

    async def window(self, seconds: float) -> dict[str, Any]:
        """What a stretch of time showed."""
        await self._house.fleet("measure")
        pids = self._house.coordinator, self._house.redis.pid
        before = [cpu_s(pid) for pid in pids]
        await asyncio.sleep(seconds)
        seen = await self._house.fleet("measure")
        used = [cpu_s(pid) - start for pid, start in zip(pids, before, strict=True)]
        self.driver.check()
        if seen["failures"]:
            self._tell(f"workers report: {seen['failures'][:5]}")
        tokens = max(1, seen["tokens"])
        return {
            "tokens_per_s": round(tokens / seen["seconds"]),
            "ack_p50_ms": round(percentile(seen["answers"], 0.5) * 1e3, 2),
            "ack_p99_ms": round(percentile(seen["answers"], 0.99) * 1e3, 2),
            "coordinator_cpu_s_per_mtok": round(used[0] / tokens * 1e6, 3),
            "redis_cpu_s_per_mtok": round(used[1] / tokens * 1e6, 3),
        }


async def _raw(plan: ScalePlan) -> dict[str, Any]:
    words = (str(plan.token_rate), str(plan.token_window_s), str(plan.token_workers * _ROLLOUTS))
    command = [sys.executable, "-m", "benchmarks.control_plane.raw", *words]
    done = await asyncio.to_thread(subprocess.run, command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _second_worst(values: list[float]) -> float:
    """One window may be the machine's fault."""
    return round(sorted(values)[-2:][0], 2)


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 3)
