"""The level: a house is filled, loaded at a rate, measured in windows, disturbed, and loaded more until it gives in."""

import asyncio
import math
import statistics
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import uvloop
from msgspec import Struct

from benchmarks.control_plane.driver import Driver
from benchmarks.control_plane.house import House
from benchmarks.control_plane.measures import cpu_s, percentile, spread
from benchmarks.control_plane.raw import raw_redis
from tests.support.waiting import wait_until

Tell = Callable[[str], None]
#: Slots filled: the rest is free, so that a placement never waits for one, and a lost worker's rollouts find room.
_FILLED: Final = 0.95
#: Windows that a steady rate is measured in. Of latencies that of the median window is told, for others use the machine
#: too; that of the best and that of all answers stand beside it.
_WINDOWS: Final = 5
#: Until the first rollout may end, once all generate; and for how long of it appends alone are measured.
_SPARED_S, _ALONE_S = 7.0, 4.0
#: Of the rate, while rollouts are placed: the few that are there first are not to make all the tokens.
_SLOW: Final = 0.02
#: The rate search: factor between rates, and the latency that ends it.
_STEP, _GIVES_IN_MS = 1.4, 100.0
#: Answers are prompt again after a rush.
_PROMPT_MS: Final = 50.0


class Load(Struct, frozen=True, kw_only=True):
    """`rate`: tokens/s in all; `seconds` of the steady part; `losses`: workers lost of each kind; `probes`: how many
    higher rates are tried at most, for `probe_s` each.
    """

    workers: int = 100
    rollouts: int = 64
    rate: float = 200_000.0
    seconds: float = 30.0
    losses: int = 12
    probes: int = 8
    probe_s: float = 5.0


def run_level(*, quick: bool = False, tell: Tell = lambda _: None, load: Load | None = None) -> dict[str, Any]:
    """The figures by name. CPU seconds are per million tokens; latencies are measured at the workers."""
    chosen = load or (Load(seconds=10.0, losses=3, probes=4, probe_s=2.0) if quick else Load())
    return uvloop.run(ControlPlaneLevel(chosen, tell).run())


class ControlPlaneLevel:
    """`house`: with its coordinator; None: one with this checkout's."""

    def __init__(self, load: Load, tell: Tell, house: House | None = None) -> None:
        self._load, self._tell, self._house = load, tell, house or House()
        self.figures: dict[str, Any] = {}

    async def run(self) -> dict[str, Any]:
        load = self._load
        raw = raw_redis(rate=load.rate, seconds=min(10.0, load.seconds), keys=load.workers * load.rollouts)
        self.figures |= {
            "raw_redis_cpu_s_per_mtok": raw["cpu_s_per_mtok"],
            "raw_redis_p99_ms": raw["pipeline"]["p99_ms"],
        }
        self._tell(f"raw pipelined RPUSH: {raw}")
        async with self.filled():
            await self._alone(raw["cpu_s_per_mtok"])
            await self._steady(raw["cpu_s_per_mtok"])
            if load.probes:
                await self._search()
            if load.losses:
                await self._lose()
            self._driver.check()
            self.figures |= {
                "acknowledged_tokens_lost": self._driver.lost_tokens,
                "acknowledged_tokens_doubled": self._driver.doubled_tokens,
                "rollouts_checked": self._driver.finished,
            }
        return self.figures

    @asynccontextmanager
    async def filled(self) -> AsyncIterator[Driver]:
        """The house with all its rollouts at work, while the block runs."""
        load = self._load
        async with self._house:
            spared = round(_SPARED_S * load.rate / (load.workers * load.rollouts * _FILLED))
            self._driver = self._new_driver(spared)
            try:
                await self._fill()
                yield self._driver
            finally:
                await self._driver.close()

    def _new_driver(self, spared: int) -> Driver:
        return Driver(self._house.address, self._house.token, spared=spared)

    async def _fill(self) -> None:
        load = self._load
        await self._driver.start()
        await self._house.fleet("pace", rate=load.rate * _SLOW)
        await self._house.fleet("open", workers=load.workers, slots=load.rollouts)
        want = int(load.workers * load.rollouts * _FILLED)
        self._driver.want(want)

        async def filled() -> bool:
            self._driver.check()
            return bool((await self._house.fleet("measure"))["running"] >= want * 0.98)

        await wait_until(filled, timeout=180, interval=0.5, what="all rollouts placed")
        await self._house.fleet("pace", rate=load.rate)
        await self._prompt()
        self._tell(f"{want} rollouts on {load.workers} workers")

    async def _prompt(self) -> None:
        """Let the rush be over: what had piled up is stored."""

        async def prompt() -> bool:
            answers = (await self._house.fleet("measure"))["answers"]
            return bool(answers) and percentile(answers, 0.5) * 1e3 < _PROMPT_MS

        await wait_until(prompt, timeout=60, interval=0.5, what="prompt answers")

    async def window(self, seconds: float) -> dict[str, Any]:
        """What a stretch of time showed."""
        await self._house.fleet("measure")
        pids = self._house.coordinator, self._house.redis.pid
        before = [cpu_s(pid) for pid in pids]
        await asyncio.sleep(seconds)
        seen = await self._house.fleet("measure")
        used = [cpu_s(pid) - start for pid, start in zip(pids, before, strict=True)]
        self._driver.check()
        if seen["failures"]:
            self._tell(f"workers report: {seen['failures'][:5]}")
        tokens = max(1, seen["tokens"])
        return {
            "tokens_per_s": round(tokens / seen["seconds"]),
            "answers": seen["answers"],
            "placements": seen["placements"],
            "ack_p50_ms": round(percentile(seen["answers"], 0.5) * 1e3, 2),
            "ack_p99_ms": round(percentile(seen["answers"], 0.99) * 1e3, 2),
            "placement_p99_ms": round(percentile(seen["placements"], 0.99) * 1e3, 2),
            "messages_per_s": round(len(seen["answers"]) / seen["seconds"]),
            "coordinator_cpu_s_per_mtok": round(used[0] / tokens * 1e6, 3),
            "redis_cpu_s_per_mtok": round(used[1] / tokens * 1e6, 3),
            "workers_cpu_share": round(seen["cpu_s"] / seen["seconds"], 2),
        }

    async def _alone(self, raw_cpu: float) -> None:
        """The append path by itself: the first rollouts generate, none ends, and so none is submitted or placed."""
        seen = await self.window(_ALONE_S)
        late = self._driver.finished > 0
        await wait_until(lambda: self._driver.finished, timeout=60, what="the first finished rollout")
        if late:
            self._tell("rollouts ended while appends alone were to be measured: the machine is too slow for it")
            return
        self._say("appends alone", seen)
        cpu = seen["coordinator_cpu_s_per_mtok"] + seen["redis_cpu_s_per_mtok"]
        self.figures |= {
            "append_path_cpu_cost_over_raw_redis": round(cpu / raw_cpu, 2),
            "append_path_coordinator_cpu_s_per_mtok": seen["coordinator_cpu_s_per_mtok"],
            "append_path_redis_cpu_s_per_mtok": seen["redis_cpu_s_per_mtok"],
        }

    async def _steady(self, raw_cpu: float) -> None:
        windows = []
        for _ in range(_WINDOWS):
            windows.append(await self.window(self._load.seconds / _WINDOWS))
            self._say("steady", windows[-1])
        cpu = {
            name: sum(one[name] for one in windows) / _WINDOWS
            for name in ("coordinator_cpu_s_per_mtok", "redis_cpu_s_per_mtok")
        }
        self.figures |= {
            "control_plane_tokens_per_s": round(sum(one["tokens_per_s"] for one in windows) / _WINDOWS),
            **_latencies("ack", windows, "answers"),
            **_latencies("placement", windows, "placements"),
            "placements": sum(len(one["placements"]) for one in windows),
            "messages_per_s": round(sum(one["messages_per_s"] for one in windows) / _WINDOWS),
            **{name: round(value, 3) for name, value in cpu.items()},
            "cpu_cost_over_raw_redis": round(sum(cpu.values()) / raw_cpu, 2),
        }

    def _say(self, what: str, seen: dict[str, Any]) -> None:
        self._tell(f"{what}: { {k: v for k, v in seen.items() if k not in {'answers', 'placements'}} }")

    async def _lose(self) -> None:
        """Lose workers, half by a broken stream, half in silence; new ones take their places."""
        hows = ("vanish", "silence")
        for number in range(2 * self._load.losses):
            lost = (await self._house.fleet("lose", how=hows[number % 2]))["worker"]
            await wait_until(partial(self._driver.lost.__contains__, lost), timeout=30, what=f"the loss of {lost}")
            await self._house.fleet("open", workers=1, slots=self._load.rollouts)

        async def resumed() -> dict[str, Any]:
            losses: dict[str, Any] = (await self._house.fleet("measure"))["losses"]
            lost = {rollout for one in losses.values() for rollout in one["rollouts"] if rollout not in one["resumed"]}
            return {} if lost & self._driver.unfinished.keys() else losses

        losses: dict[str, Any] = await wait_until(
            resumed, timeout=60, interval=0.5, what="every lost rollout elsewhere"
        )
        for how, name in zip(hows, ("broken_stream", "silent"), strict=True):
            mine = {worker: one for worker, one in losses.items() if one["how"] == how}
            detected = [self._driver.lost[worker] - one["at"] for worker, one in mine.items()]
            resumes = [at - self._driver.lost[worker] for worker, one in mine.items() for at in one["resumed"].values()]
            self.figures |= {f"{name}_detection_{k}": v for k, v in spread(detected, "s").items()}
            self.figures |= {f"{name}_resume_{k}": v for k, v in spread(resumes, "s").items()}
        figures = self.figures
        figures["detection_p99_s"] = figures["silent_detection_p99_s"]
        for share in ("p50_s", "p99_s"):
            figures[f"resume_{share}"] = max(figures[f"{name}_resume_{share}"] for name in ("broken_stream", "silent"))
        self._tell(f"detection and resume: { {k: v for k, v in figures.items() if 'tect' in k or 'resume' in k} }")

    async def _search(self) -> None:
        """The highest rate whose tokens are stored as they come, with a p99 that is not beyond the limit: from above
        the steady one up (or down) until one holds and the next does not, and once between them.
        """
        good, bad, rate = 0.0, math.inf, self._load.rate * _STEP
        for _ in range(self._load.probes):
            if await self._holds(rate):
                good = rate
            else:
                bad = rate
                await self._house.fleet("pace", rate=self._load.rate / 2)
                await self._prompt()
            if good and bad < math.inf:
                if bad / good < _STEP - 0.01:
                    break
                rate = math.sqrt(good * bad)
            else:
                rate = rate * _STEP if good else rate / _STEP
        self.figures["highest_tokens_per_s_is_a_limit"] = bad < math.inf
        await self._house.fleet("pace", rate=self._load.rate)
        await self._prompt()

    async def _holds(self, rate: float) -> bool:
        await self._house.fleet("pace", rate=rate)
        await asyncio.sleep(1.0)
        windows = [await self.window(self._load.probe_s / 2) for _ in range(2)]
        p99_ms = min(one["ack_p99_ms"] for one in windows)
        stored = max(one["tokens_per_s"] for one in windows)
        holds = p99_ms < _GIVES_IN_MS and stored >= 0.97 * rate
        self._tell(f"{rate:,.0f} tokens/s: {stored:,} stored, p99 {p99_ms} ms: {'holds' if holds else 'no'}")
        if holds:
            self.figures |= {"highest_tokens_per_s": round(rate), "highest_ack_p99_ms": p99_ms}
        return bool(holds)


def _latencies(name: str, windows: list[dict[str, Any]], values: str) -> dict[str, Any]:
    """The p99 of the median window, of the best, of each, and of all values at once."""
    every = spread([value for one in windows for value in one[values]], "ms", 1e3)
    p99 = [one[f"{name}_p99_ms"] for one in windows]
    known = [value for value in p99 if not math.isnan(value)]
    return {
        f"{name}_p50_ms": every["p50_ms"],
        f"{name}_p99_ms": round(statistics.median(known), 2) if known else None,
        f"{name}_p99_best_ms": min(known, default=None),
        f"{name}_p99_windows_ms": p99,
        f"{name}_p99_all_windows_ms": every["p99_ms"],
    }
