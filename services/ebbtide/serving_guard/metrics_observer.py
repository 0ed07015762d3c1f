"""Observes traffic that does not pass the guard (mode observe), from the engine's Prometheus metrics.

The guard notices a request up to the interval and one answer late, so the request may meet a rollout step that a proxy
would have held back. An answer costs the engine's API server a few milliseconds. So metrics are read at the interval
only while rollouts may run, and less often while they may not, without borrowers, or where answers are slow.

Invariant: without a recent valid answer there is no budget. This covers failures, impossible values, the end of this
task and answers that are too old.
"""

import asyncio
import re
import time
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from math import inf
from typing import Final

import aiohttp
from msgspec import Struct

from ebbtide import telemetry
from ebbtide.serving_guard import metrics
from ebbtide.serving_guard.budget_keeper import BudgetKeeper
from ebbtide.serving_guard.memory_budget import MemoryBudget
from ebbtide.serving_guard.slo_stats import SloStats

log = telemetry.get_logger(__name__)

#: How many times longer the interval is while there is no budget.
_TAKEN: Final = 2.0
#: The least interval while there are no borrowers.
_IDLE_S: Final = 1.0
#: Answers take at most one part in this many of the engine's time.
_SHARE: Final = 10.0
#: An answer that takes longer counts as a failure.
_TIMEOUT_S: Final = 0.25
_INSIDE: Final = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
_ENDED: Final = "vllm:request_success_total"
_TTFT: Final = "vllm:time_to_first_token_seconds"
#: The first of these that the engine has is used: per request, or (older engines) per token.
_TPOT: Final = (
    "vllm:request_time_per_output_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:time_per_output_token_seconds",
)
_WANTED: Final = (*_INSIDE, _ENDED, _TTFT, *_TPOT)
_LINE: Final = re.compile(rb"^(vllm:[a-z_]+)(?:\{(.*)\})? (\S+)", re.MULTILINE)
_LE: Final = re.compile(rb'le="([^"]+)"')
_REASON: Final = re.compile(rb'finished_reason="([^"]+)"')
#: Values of each latency that are recorded from one answer, at most: there may be thousands of tokens.
_MOST: Final = 64


class MetricsSample(Struct, frozen=True):
    """One answer: gauges and sums over all its engines."""

    inside: int
    waiting: int  # in the engine's queue; requests in prefill have no first token either
    kv_usage: float
    ended: int
    failed: int  # of those that ended
    histograms: Mapping[str, Mapping[float, float]]  # cumulative counts by upper bound

    @property
    def started(self) -> int:
        """Requests that have had a first token, since the engine's start."""
        return int(max(self.histograms.get(_TTFT, {}).values(), default=0.0))


class MetricsObserver:
    """Reads `url` and reports to the keeper. `interval_s`: between reads while rollouts may run."""

    address = ""

    def __init__(
        self,
        url: str,
        keeper: BudgetKeeper,
        stats: SloStats,
        memory: MemoryBudget,
        *,
        interval_s: float,
        borrowed: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url, self._keeper, self._stats, self._memory = url, keeper, stats, memory
        self._interval_s, self._borrowed, self._clock = interval_s, borrowed, clock
        self._last: MetricsSample | None = None
        self._unstarted = 0  # requests inside without a first token
        self._timeout_s = max(_TIMEOUT_S, 3 * interval_s)
        self._task: asyncio.Task[None] | None = None
        self._failing = False

    async def start(self) -> None:
        self._keeper.lose_sight()
        self._task = asyncio.create_task(self._run(), name="observe")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        try:
            async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session:
                while True:
                    began = self._clock()
                    try:
                        await self._look(session)
                    except Exception as error:  # noqa: BLE001 - after any failure the traffic is unknown
                        self._fail(error)
                    await asyncio.sleep(self._pause(self._clock() - began))
        finally:
            self._keeper.lose_sight()

    async def _look(self, session: aiohttp.ClientSession) -> None:
        async with session.get(self._url) as answer:
            answer.raise_for_status()
            sample = parsed(await answer.read())
        self._record(sample, self._clock())
        if not self._borrowed():
            self._keeper.lose_sight()  # a new borrower waits for the next answer

    def _pause(self, answer_s: float) -> float:
        """Seconds until the next read."""
        if not self._borrowed():
            return max(_IDLE_S, self._interval_s)
        taken = self._failing or not self._keeper.decision.budget.tokens
        wanted = self._interval_s * (_TAKEN if taken else 1.0)
        return max(wanted - answer_s, (_SHARE - 1) * min(answer_s, self._interval_s), 0.001)

    def _observed(self, inside: int, waiting: int, now: float) -> None:
        # It holds for the longest pause between two answers and the longest answer.
        self._keeper.observed(inside, waiting, now, holds_s=_SHARE * self._interval_s + self._timeout_s)

    def _record(self, sample: MetricsSample, now: float) -> None:
        if self._failing:
            log.info("the engine's metrics are back")
        self._failing = False
        last, self._last = self._last, sample
        self._memory.usage(now, sample.kv_usage)
        if last is None:
            self._observed(sample.inside, sample.inside, now)
            self._unstarted = sample.inside
            return
        ended = max(0, sample.ended - last.ended)
        came = max(0, sample.inside - last.inside + ended)
        unstarted = self._unstarted + came - max(0, sample.started - last.started)
        self._unstarted = min(max(unstarted, sample.waiting), sample.inside)
        if ended and not (sample.inside or last.inside):
            self._observed(1, 0, now)  # a request came and ended between two answers
        self._observed(sample.inside, self._unstarted, now)
        self._record_latencies(last, sample, ended)

    def _record_latencies(self, last: MetricsSample, sample: MetricsSample, ended: int) -> None:
        self._stats.finished(ended, max(0, sample.failed - last.failed))
        learnt = self._keeper.learnt()
        tpot = next((name for name in _TPOT if name in sample.histograms), _TPOT[0])
        for kind, name, target in (("ttft", _TTFT, learnt.ttft_target_s), ("tpot", tpot, learnt.tpot_target_s)):
            before, after = last.histograms.get(name, {}), sample.histograms.get(name, {})
            self._stats.served(kind, list(between(before, after)), target)

    def _fail(self, error: Exception) -> None:
        metrics.OBSERVE_FAILURES.inc()
        if not self._failing:
            log.warning(
                "the engine's metrics fail: no budget", url=self._url, reason=str(error) or type(error).__name__
            )
        self._failing = True
        self._keeper.lose_sight()


def parsed(text: bytes) -> MetricsSample:
    """Parse an answer in Prometheus' text format. Raises `ValueError` if it lacks the numbers of requests, or holds an
    impossible value."""
    values: defaultdict[str, float] = defaultdict(float)
    histograms: dict[str, defaultdict[float, float]] = {}
    for name_, labels, number in _LINE.findall(text):
        name, value = name_.decode(), float(number)
        base = name.removesuffix("_bucket")
        if {name, base} & set(_WANTED) and not 0 <= value < inf:
            raise ValueError(f"{name} is {value}")
        if name in _WANTED:
            values[name] += value
            if name == _ENDED and (reason := _REASON.search(labels)) and reason[1] in {b"error", b"abort"}:
                values["failed"] += value
        elif base != name and base in _WANTED and (bound := _LE.search(labels)):
            histograms.setdefault(base, defaultdict(float))[float(bound[1])] += value
    running, waiting, usage = _INSIDE
    if running not in values or waiting not in values:
        raise ValueError(f"no {running} and {waiting} in the answer: is it vLLM's /metrics?")
    return MetricsSample(
        inside=int(values[running]) + int(values[waiting]),
        waiting=int(values[waiting]),
        kv_usage=values[usage],
        ended=int(values[_ENDED]),
        failed=int(values["failed"]),
        histograms=histograms,
    )


def between(before: Mapping[float, float], after: Mapping[float, float]) -> Iterator[float]:
    """The values that a histogram gained between two answers, each as its bucket's upper bound.

    The topmost bucket has no bound: it counts as twice the bound below it.
    """
    bounds = sorted(after)
    below = 0.0
    made = 0
    for bound in bounds:
        new = after[bound] - before.get(bound, 0.0)
        count = min(int(new - below), _MOST - made)
        below = max(below, new)
        if count > 0:
            finite = bounds[bisect(bounds, bound) - 2] * 2 if bound == float("inf") and len(bounds) > 1 else bound
            yield from [finite] * count
            made += count
