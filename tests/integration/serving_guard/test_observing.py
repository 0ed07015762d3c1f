"""In mode observe the engine's metrics decide when rollouts may run."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.integration.serving_guard.borrower import Borrowing
from tests.integration.serving_guard.engine import ServingEngine, metrics_text
from tests.integration.serving_guard.guards import GuardProcess, guard_process
from tests.support.waiting import wait_until


@pytest.fixture
async def engine() -> AsyncIterator[ServingEngine]:
    async with ServingEngine() as made:
        made.metrics = metrics_text(0, 0, ended=10, ttft={0.1: 10, 1.0: 10})
        yield made


@pytest.fixture
async def guard(grant_dir: Path, engine: ServingEngine) -> AsyncIterator[GuardProcess]:
    with guard_process(grant_dir, engine.url, mode="observe", observe_ms=20, ttft_ms=300, tpot_ms=50) as made:
        await made.ready()
        yield made


async def test_a_worker_pauses_while_the_metrics_say_that_somebody_is_served(
    guard: GuardProcess, grant_dir: Path, engine: ServingEngine
) -> None:
    with Borrowing(grant_dir) as worker:
        await wait_until(lambda: worker.page.steps().steps > 5)
        engine.metrics = metrics_text(1, 1, ended=10)
        await wait_until(lambda: not worker.stepping_lately)
        state = await guard.status()
        assert (state.mode, state.inside, state.waiting, state.state) == ("observe", 2, 2, "reclaimed")
        stood = worker.page.steps().steps
        engine.metrics = metrics_text(0, 0, ended=12)
        await wait_until(lambda: worker.page.steps().steps > stood)


async def test_metrics_that_fail_mean_no_budget_until_they_are_back(
    guard: GuardProcess, grant_dir: Path, engine: ServingEngine
) -> None:
    with Borrowing(grant_dir) as worker:
        await wait_until(lambda: worker.page.steps().steps > 5)
        engine.metrics = None
        await wait_until(lambda: not worker.stepping_lately)
        assert (await guard.status()).state == "blind"
        stood = worker.page.steps().steps
        engine.metrics = metrics_text(0, 0)
        await wait_until(lambda: worker.page.steps().steps > stood)


async def test_an_answer_that_cannot_be_means_no_budget_until_one_that_can(
    guard: GuardProcess, grant_dir: Path, engine: ServingEngine
) -> None:
    with Borrowing(grant_dir) as worker:
        await wait_until(lambda: worker.page.steps().steps > 5)
        engine.metrics = metrics_text(0, 0) + "vllm:kv_cache_usage_perc NaN\n"
        await wait_until(lambda: not worker.stepping_lately)
        assert (await guard.status()).state == "blind"
        stood = worker.page.steps().steps
        engine.metrics = metrics_text(0, 0)
        await wait_until(lambda: worker.page.steps().steps > stood)


async def test_latencies_come_from_the_histograms(guard: GuardProcess, grant_dir: Path, engine: ServingEngine) -> None:
    with Borrowing(grant_dir) as worker:
        await wait_until(lambda: worker.page.steps().steps > 5)
        engine.metrics = metrics_text(0, 0, ended=14, ttft={0.1: 13, 1.0: 14})
        await wait_until(lambda: _served(guard, 4))
        state = await guard.status()
        assert (state.ttft.p50, state.ttft.p99, state.ttft.attained) == (0.1, 1.0, 0.75)


async def test_metrics_are_asked_for_seldom_while_nobody_borrows(guard: GuardProcess, engine: ServingEngine) -> None:
    await wait_until(lambda: engine.asked >= 2)
    asked = engine.asked
    await wait_until(lambda: engine.asked > asked)
    assert (await guard.status()).uptime_s > 0.5 * engine.asked


async def _served(guard: GuardProcess, requests: int) -> bool:
    return (await guard.status()).requests == requests
