"""Guard and worker die, freeze or misbehave: rollouts stand still by themselves, or are made to; users are served."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.cluster import Cluster
from tests.chaos.load import Begin
from tests.integration.serving_guard.borrower import Borrowing
from tests.integration.serving_guard.engine import ServingEngine, ask
from tests.integration.serving_guard.guards import GuardProcess, guard_process, status
from tests.support.waiting import wait_until

#: A guard's last grant holds 0.2 s, and the step that begins at its very end takes its time.
STANDS_S = 0.25
#: What two cores that others use too may add to a moment.
SLACK_S = 0.1


@pytest.fixture
async def engine() -> AsyncIterator[ServingEngine]:
    async with ServingEngine() as made:
        yield made


@pytest.fixture
async def guard(grant_dir: Path, engine: ServingEngine) -> AsyncIterator[GuardProcess]:
    with guard_process(grant_dir, engine.url, yield_ms=100, kill_s=2, max_stops=1) as made:
        await made.ready()
        yield made


async def stands_since(worker: Borrowing, *, for_s: float = 0.3) -> float:
    """When the engine made its last step: none came for `for_s` behind it."""
    await wait_until(lambda: not worker.page.steps().stepping and time.monotonic() - worker.page.steps().ended > for_s)
    return worker.page.steps().ended


async def going(worker: Borrowing, steps: int = 5) -> None:
    """Some more steps were made."""
    begin = worker.page.steps().steps
    await wait_until(lambda: worker.page.steps().steps >= begin + steps)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_without_its_guard_a_worker_pauses_by_itself(
    guard: GuardProcess, grant_dir: Path, fault: signal.Signals
) -> None:
    with Borrowing(grant_dir) as worker:
        await going(worker)
        guard.signal(fault)
        struck = time.monotonic()
        assert await stands_since(worker) - struck <= STANDS_S


async def test_a_guard_that_thaws_grants_again(guard: GuardProcess, grant_dir: Path) -> None:
    with Borrowing(grant_dir) as worker:
        await going(worker)
        guard.signal(signal.SIGSTOP)
        await stands_since(worker)
        guard.signal(signal.SIGCONT)
        await going(worker)
        (borrower,) = (await status(grant_dir)).borrowers
        assert borrower.stops == 0, "that it was frozen is not the worker's fault"


async def test_a_guard_that_is_started_again_finds_its_worker(
    guard: GuardProcess, grant_dir: Path, engine: ServingEngine
) -> None:
    with Borrowing(grant_dir) as worker:
        await going(worker)
        guard.close()
        await stands_since(worker)
        with guard_process(grant_dir, engine.url) as successor:
            await successor.ready()
            await going(worker)
            assert b"[DONE]" in await ask(successor.url)


async def test_a_frozen_worker_leaves_the_served_engine_alone(guard: GuardProcess, grant_dir: Path) -> None:
    with Borrowing(grant_dir) as worker:
        await going(worker)
        worker.process.send_signal(signal.SIGSTOP)
        struck = time.monotonic()
        assert await stands_since(worker) - struck <= 1.0
        assert b"[DONE]" in await ask(guard.url)
        worker.process.send_signal(signal.SIGCONT)
        await going(worker)


async def test_a_worker_that_dies_leaves_nothing_behind(guard: GuardProcess, grant_dir: Path) -> None:
    with Borrowing(grant_dir) as worker:
        await going(worker)
        worker.process.kill()
        await wait_until(lambda: _borrowers(guard, 0))
        assert b"[DONE]" in await ask(guard.url)


async def test_an_engine_that_does_not_yield_is_stopped_then_continued_and_at_last_killed(
    guard: GuardProcess, grant_dir: Path, engine: ServingEngine
) -> None:
    with Borrowing(grant_dir, manner="stubborn") as worker:
        await going(worker)
        for outcome in ("T", "XZ"):
            engine.go.clear()
            request = asyncio.create_task(ask(guard.url))
            await wait_until(lambda: worker.state() in outcome, what=outcome)  # noqa: B023
            engine.go.set()
            assert b"[DONE]" in await request
            if outcome == "T":
                await wait_until(lambda: worker.state() not in "TXZ")
                await going(worker)
        await wait_until(lambda: _borrowers(guard, 0))


async def test_a_step_without_end_is_stopped_and_killed_if_serving_goes_on(
    guard: GuardProcess, grant_dir: Path, engine: ServingEngine
) -> None:
    with Borrowing(grant_dir, manner="stuck") as worker:
        await going(worker)
        (grant_dir / "stick").touch()
        await wait_until(lambda: worker.page.steps().stepping and time.monotonic() - worker.page.steps().began > 0.1)
        engine.go.clear()
        request = asyncio.create_task(ask(guard.url))
        sent = time.monotonic()
        await wait_until(lambda: worker.state() == "T")
        assert time.monotonic() - sent < 1.0 + SLACK_S
        await wait_until(lambda: worker.state() in "XZ")
        assert time.monotonic() - sent >= 2.0
        engine.go.set()
        assert b"[DONE]" in await request


async def test_an_engine_left_stopped_by_a_guard_that_died_goes_on_under_the_next(
    guard: GuardProcess, grant_dir: Path, engine: ServingEngine
) -> None:
    with Borrowing(grant_dir) as worker:
        await going(worker)
        os.kill(worker.engine, signal.SIGSTOP)
        guard.close()
        assert worker.state() == "T", "its guard died without a word"
        with guard_process(grant_dir, engine.url) as successor:
            await successor.ready()
            await going(worker)
            assert worker.state() not in "TXZ"


async def test_a_run_that_borrows_loses_no_token_to_reclaims_nor_to_its_guards_death(
    cluster: Cluster, begin: Begin, grant_dir: Path, engine: ServingEngine
) -> None:
    load = await begin(workers=1)
    guard: dict[str, Any] = {"upstream": engine.url, "grant_dir": grant_dir, "listen": "127.0.0.1:0"}
    await cluster.start("guard", "serving_guard", **guard)
    await cluster.worker("w2", kind="borrowed", grant_dir=grant_dir)
    engine.tokens, engine.gap_s = 4, 0.02
    for _ in range(2):
        await load.submit(96)
        await wait_until(lambda: _reclaimed_once(grant_dir, cluster.process["guard"].address), 20, interval=0.1)
        cluster.kill("guard")
        await cluster.start("guard", "serving_guard", **guard)
    await load.settle()
    assert load.generated_twice() == 0
    assert sum(record.generated for record in cluster.ledger("w2")) > 0


async def _reclaimed_once(grant_dir: Path, address: str) -> bool:
    """Serve a request; whether that took a budget from a worker that had made use of it."""
    assert b"[DONE]" in await ask(f"http://{address}")
    borrowers = (await status(grant_dir)).borrowers
    assert not any(one.stops for one in borrowers)
    return any(one.tokens_harvested and one.reclaims for one in borrowers)


async def _borrowers(guard: GuardProcess, count: int) -> bool:
    return len((await guard.status()).borrowers) == count
