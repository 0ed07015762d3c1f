"""A worker beside a guard steps while the engine serves no request, and stands still in time when it does."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.integration.serving_guard.borrower import Borrowing
from tests.integration.serving_guard.engine import ServingEngine, ask
from tests.integration.serving_guard.guards import GuardProcess, guard_process
from tests.support.waiting import wait_until


@pytest.fixture
async def engine() -> AsyncIterator[ServingEngine]:
    async with ServingEngine() as made:
        yield made


@pytest.fixture
async def guard(grant_dir: Path, engine: ServingEngine) -> AsyncIterator[GuardProcess]:
    with guard_process(grant_dir, engine.url) as made:
        await made.ready()
        yield made


async def test_a_worker_steps_while_nobody_is_served_and_pauses_while_somebody_is(
    guard: GuardProcess, grant_dir: Path, engine: ServingEngine
) -> None:
    with Borrowing(grant_dir) as worker:
        await wait_until(lambda: worker.page.steps().steps > 5)
        engine.go.clear()
        request = asyncio.create_task(ask(guard.url))
        await wait_until(lambda: not worker.stepping_lately)
        stood = worker.page.steps().steps
        state = await wait_until(lambda: _state(guard, "reclaimed"))
        assert state.inside == state.waiting == 1
        assert worker.page.steps().steps == stood
        engine.go.set()
        assert b"[DONE]" in await request
        await wait_until(lambda: worker.page.steps().steps > stood)


async def test_the_status_says_what_was_served_and_harvested(
    guard: GuardProcess, grant_dir: Path, engine: ServingEngine
) -> None:
    engine.tokens, engine.gap_s, engine.first_s = 5, 0.01, 0.03
    with Borrowing(grant_dir) as worker:
        await wait_until(lambda: worker.page.steps().steps > 5)
        for _ in range(4):
            await ask(guard.url)
            stood = worker.page.steps().steps
            await wait_until(lambda: worker.page.steps().steps > stood)  # noqa: B023
        state = await guard.status()
        assert (state.requests, state.failed, state.mode) == (4, 0, "proxy")
        assert 0.03 <= state.ttft.p50 < 0.3
        assert 0.01 <= state.tpot.p50 < 0.1
        assert 0 < state.load < 1
        borrower = await wait_until(lambda: _harvested(guard))
        assert borrower.worker_id == "w1"
        assert borrower.reclaims >= 1
        assert 0 <= borrower.reclaim_p99_s < 0.1
        assert borrower.gpu_seconds > 0


async def test_a_guard_that_leaves_gives_grants_back_and_lets_requests_end(
    guard: GuardProcess, grant_dir: Path, engine: ServingEngine
) -> None:
    engine.tokens, engine.gap_s = 10, 0.02
    with Borrowing(grant_dir) as worker:
        await wait_until(lambda: worker.page.steps().steps > 5)
        request = asyncio.create_task(ask(guard.url))
        await wait_until(lambda: _state(guard, "reclaimed", "shared"))
        guard.signal(signal.SIGTERM)
        assert b"[DONE]" in await request
        assert await asyncio.to_thread(guard.process.wait, 10) == 0
        assert not worker.page.budget().tokens


async def test_only_one_guard_serves_a_folder(guard: GuardProcess, grant_dir: Path, engine: ServingEngine) -> None:
    with guard_process(grant_dir, engine.url) as second:
        assert await asyncio.to_thread(second.process.wait, 20) == 1


async def _state(guard: GuardProcess, *states: str):  # type: ignore[no-untyped-def]
    state = await guard.status()
    return state if state.state in states else None


async def _harvested(guard: GuardProcess):  # type: ignore[no-untyped-def]
    state = await guard.status()
    return next((one for one in state.borrowers if one.tokens_harvested), None)
