"""A trainer lends its device between its steps, and has it for itself when it is told so."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from ebbtide.errors import LeaseSuperseded
from ebbtide.trainer.lending import device_loan
from ebbtide.trainer.lending.device_loan import DeviceLoan
from ebbtide.types.grants import Residency
from tests.integration.serving_guard.borrower import Borrowing
from tests.integration.serving_guard.guards import guard_process
from tests.integration.serving_guard.trainer_guards import TrainerGuardProcess, owner_process, trainer_guard_process
from tests.support.waiting import wait_until

ANY_PORT = "127.0.0.1:0"


@pytest.fixture
async def guard(grant_dir: Path) -> AsyncIterator[TrainerGuardProcess]:
    with trainer_guard_process(grant_dir, trainer_silent_s=2.5) as made:
        await made.ready()
        yield made


@asynccontextmanager
async def owning(folder: Path, run_id: str = "r", lease: int = 1) -> AsyncIterator[DeviceLoan]:
    loan = DeviceLoan(folder, run_id=run_id, lease=lease)
    running = asyncio.create_task(loan.run())
    try:
        yield loan
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError, LeaseSuperseded):
            await running


async def steps_on(worker: Borrowing) -> None:
    """Wait until the engine steps."""
    stood = worker.page.steps().steps
    await wait_until(lambda: worker.page.steps().steps > stood + 3, 20, what="steps")


async def test_engines_step_while_the_device_is_lent_and_not_once_it_is_back(
    guard: TrainerGuardProcess, grant_dir: Path
) -> None:
    async with owning(grant_dir) as loan:
        with Borrowing(grant_dir) as worker:
            for _ in range(5):
                loan.lend()
                await steps_on(worker)
                await loan.take_back()
                steps = worker.page.steps()
                assert not steps.stepping
                assert not worker.page.offered().tokens
                state = await guard.status()
                assert (state.state, state.run_id, state.lease) == ("held", "r", 1)
                assert state.borrowers[0].residency is Residency.HOST
                assert worker.page.steps().steps == steps.steps
            assert state.take_backs >= 5
            assert state.borrowers[0].reclaim_p99_s < 0.1
            assert state.held_s > 0 < state.lent_s


async def test_the_device_of_a_killed_trainer_is_lent_until_its_next_life_takes_it_back(
    guard: TrainerGuardProcess, grant_dir: Path
) -> None:
    with Borrowing(grant_dir) as worker:
        with owner_process(grant_dir) as owner:
            stood = worker.page.steps().steps
            owner.kill()
            await wait_until(lambda: worker.page.steps().steps > stood + 3, 10)
            assert (await guard.status()).state == "abandoned"
        with owner_process(grant_dir, lease=2):
            assert not worker.page.offered().tokens
            assert (await guard.status()).lease == 2


async def test_the_device_of_a_frozen_trainer_is_lent_until_it_speaks_again(
    guard: TrainerGuardProcess, grant_dir: Path
) -> None:
    with Borrowing(grant_dir) as worker, owner_process(grant_dir) as owner:
        owner.send_signal(signal.SIGSTOP)
        await steps_on(worker)
        owner.send_signal(signal.SIGCONT)
        await wait_until(lambda: not worker.stepping_lately and not worker.page.offered().tokens, 10)


async def test_no_engine_steps_while_the_guard_of_a_held_device_is_killed_and_started_again(
    guard: TrainerGuardProcess, grant_dir: Path
) -> None:
    async with owning(grant_dir) as loan:
        with Borrowing(grant_dir) as worker:
            loan.lend()
            await steps_on(worker)
            await loan.take_back()
            stood = worker.page.steps().steps
            guard.end()
            await guard.start_again()
            again = await wait_until(lambda: held(guard))
            assert again.memory_back
            assert worker.page.steps().steps == stood
            loan.lend()
            await steps_on(worker)


async def test_without_a_guard_a_step_begins_when_no_engine_computes_or_may(
    guard: TrainerGuardProcess, grant_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_loan, "_ALONE_S", 0.3)
    async with owning(grant_dir) as loan:
        with Borrowing(grant_dir, manner="stuck") as worker:
            loan.lend()
            await steps_on(worker)
            (grant_dir / "stick").touch()
            await wait_until(lambda: worker.page.steps().stepping)
            guard.end()
            await wait_until(lambda: not worker.page.offered().tokens)
            taking = asyncio.create_task(loan.take_back())
            await asyncio.wait([taking], timeout=1.0)
            assert worker.page.steps().stepping
            assert not taking.done(), "its step goes on"
            (grant_dir / "stick").unlink()
            await asyncio.wait_for(taking, 10)
            assert not worker.page.steps().stepping


async def test_an_older_lease_is_refused_and_steps_down(guard: TrainerGuardProcess, grant_dir: Path) -> None:
    older = DeviceLoan(grant_dir, run_id="r", lease=1)
    running = asyncio.create_task(older.run())
    await older.take_back()
    async with owning(grant_dir, lease=2) as newer:
        await newer.take_back()
        with pytest.raises(LeaseSuperseded, match="step down"):
            await asyncio.wait_for(running, 10)
        with pytest.raises(LeaseSuperseded, match="newer lease"):
            await asyncio.wait_for(DeviceLoan(grant_dir, run_id="r", lease=1).run(), 10)


async def test_the_trainer_of_another_run_gets_the_device_when_its_owner_is_gone(
    guard: TrainerGuardProcess, grant_dir: Path
) -> None:
    async with owning(grant_dir) as first:
        await first.take_back()
        second = DeviceLoan(grant_dir, run_id="s", lease=1)
        running = asyncio.create_task(second.run())
        taking = asyncio.create_task(second.take_back())
        await asyncio.wait([taking], timeout=0.5)
        assert not taking.done()
    await asyncio.wait_for(taking, 10)
    running.cancel()


async def test_an_engine_that_does_not_end_its_step_is_stopped_and_gone_before_the_memory_counts_as_back(
    grant_dir: Path,
) -> None:
    with trainer_guard_process(grant_dir, kill_s=1.0) as guard:
        await guard.ready()
        async with owning(grant_dir) as loan:
            with Borrowing(grant_dir, manner="stuck") as worker:
                loan.lend()
                await steps_on(worker)
                (grant_dir / "stick").touch()
                taking = asyncio.create_task(loan.take_back())
                state = await wait_until(lambda: computed(guard), 10)
                assert worker.state() == "T"
                assert not state.memory_back
                assert state.waits_for == "the memory of w1"
                await asyncio.wait_for(taking, 10)
                assert worker.state() in "ZX"


async def test_an_engine_that_keeps_its_memory_is_killed(grant_dir: Path) -> None:
    with trainer_guard_process(grant_dir, trainer_memory_s=0.5) as guard:
        await guard.ready()
        async with owning(grant_dir) as loan:
            with Borrowing(grant_dir, manner="hoarding") as worker:
                loan.lend()
                await steps_on(worker)
                began = time.monotonic()
                await asyncio.wait_for(loan.take_back(), 10)
                assert time.monotonic() - began >= 0.5
                assert worker.state() in "ZX"


async def test_a_worker_that_is_killed_gives_everything_back(guard: TrainerGuardProcess, grant_dir: Path) -> None:
    async with owning(grant_dir) as loan:
        with Borrowing(grant_dir, manner="hoarding") as worker:
            loan.lend()
            await steps_on(worker)
        await asyncio.wait_for(loan.take_back(), 10)


async def test_only_one_guard_serves_a_folder(guard: TrainerGuardProcess, grant_dir: Path) -> None:
    with trainer_guard_process(grant_dir) as second:
        assert await asyncio.to_thread(second.process.wait, 20) == 1


async def test_a_guard_that_is_not_told_of_the_trainer_does_not_lend_the_trainers_device(
    guard: TrainerGuardProcess, grant_dir: Path
) -> None:
    with owner_process(grant_dir):
        guard.end()
        command = [sys.executable, "-m", "ebbtide.serving_guard", "--grant-dir", str(grant_dir), "--listen", ANY_PORT]
        ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=20)
        assert ended.returncode == 1
        assert "owner: a trainer has owned this device" in ended.stderr
        assert "set owner = trainer" in ended.stderr
        await guard.start_again()
        await wait_until(lambda: held(guard, engines=False), 20)


async def test_a_trainer_whose_guard_serves_an_engine_waits_and_says_how_to_start_the_guard(
    grant_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_ALONE_S", "_EMPTY_S"):
        monkeypatch.setattr(device_loan, name, 0.0)
    with guard_process(grant_dir, "http://127.0.0.1:9") as guard:
        await guard.ready()
        async with owning(grant_dir) as loan:
            loan.want(loan.next_wish(lend=False, spell_s=0.0))
            await wait_until(lambda: "owner = trainer" in loan.progress().waits_for, 10)
            assert not loan.progress().back


async def held(guard: TrainerGuardProcess, *, engines: bool = True):  # type: ignore[no-untyped-def]
    state = await guard.status()
    return state if state.state == "held" and bool(state.borrowers) is engines and state.memory_back else None


async def computed(guard: TrainerGuardProcess):  # type: ignore[no-untyped-def]
    state = await guard.status()
    return state if state.compute_back else None
