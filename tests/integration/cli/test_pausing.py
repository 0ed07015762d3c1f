"""A program that runs only while nothing is inside the serving engine."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from ebbtide.demo.coserving.guarded_pausing import pausing
from ebbtide.grants import Page
from ebbtide.types.grants import Budget
from tests.support.waiting import wait_until

SLEEP = "import time; time.sleep(600)"
#: Says so once its child runs: one that is stopped between fork and exec keeps its parent from stopping, too.
PARENT = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}]); print(flush=True); {SLEEP}"


@pytest.fixture
def page(tmp_path: Path) -> Page:
    return Page(tmp_path / "w.page", create=True)


@pytest.fixture
async def program() -> AsyncIterator[subprocess.Popen[bytes]]:
    with start(PARENT) as started:
        try:
            assert started.stdout is not None
            await asyncio.wait_for(asyncio.to_thread(started.stdout.readline), 30)
            assert len(group(started)) == 2
            yield started
        finally:
            os.killpg(started.pid, signal.SIGKILL)


def start(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)


def group(started: subprocess.Popen[bytes]) -> list[psutil.Process]:
    first = psutil.Process(started.pid)
    return [first, *first.children()]


def stopped(started: subprocess.Popen[bytes]) -> bool:
    return all(one.status() == psutil.STATUS_STOPPED for one in group(started))


def runs(started: subprocess.Popen[bytes]) -> bool:
    return all(one.status() != psutil.STATUS_STOPPED for one in group(started))


async def test_it_pauses_without_a_budget_and_resumes_where_nothing_is_inside(
    page: Page, program: subprocess.Popen[bytes]
) -> None:
    with pausing(page, lambda: program.pid) as made:
        await wait_until(lambda: stopped(program), what="no budget, no processor")
        page.write_budget(Budget(256, 32, time.monotonic() + 600), idle=True)
        await wait_until(lambda: runs(program), what="an idle engine, whoever holds a lease")
        page.write_budget(Budget())
        await wait_until(lambda: stopped(program), what="an arrival takes it back")
        made.generated = 77
        await wait_until(lambda: made.moments[-1].generated == 77, what="a note of it")
    assert {(one.tokens, one.training) for one in made.moments} == {(0, False), (256, True)}


async def test_a_budget_beside_requests_is_not_for_it_however_large_and_long(
    page: Page, program: subprocess.Popen[bytes]
) -> None:
    with pausing(page, lambda: program.pid) as made:
        await wait_until(lambda: stopped(program), what="no budget")
        noted = len(made.moments)
        for _ in range(20):
            page.write_budget(Budget(256, 64, time.monotonic() + 0.2))
            await wait_until(lambda: made.moments[-1].at_s > time.monotonic() - 0.1)
        assert not any(one.training for one in made.moments[noted:])


async def test_it_goes_on_for_good_at_the_end_however_that_comes(page: Page, program: subprocess.Popen[bytes]) -> None:
    async def broken() -> None:
        with pausing(page, lambda: program.pid):
            await wait_until(lambda: stopped(program), what="no budget")
            raise KeyError

    with pytest.raises(KeyError):
        await broken()
    assert runs(program)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_it_goes_on_even_if_nobody_knows_any_more_who_it_is(page: Page, program: subprocess.Popen[bytes]) -> None:
    known = {"program": program.pid}
    with pausing(page, lambda: known["program"]):
        await wait_until(lambda: stopped(program), what="no budget")
        known.clear()
        await wait_until(lambda: runs(program), what="it is not left stopped")
    assert runs(program)


async def test_a_program_that_ended_is_let_be(page: Page, program: subprocess.Popen[bytes]) -> None:
    pids: list[int | None] = [program.pid]
    with pausing(page, lambda: pids[-1]) as made:
        await wait_until(lambda: stopped(program), what="no budget")
        pids.append(None)
        page.write_budget(Budget(256, 32, time.monotonic() + 600), idle=True)
        await wait_until(lambda: made.moments[-1].tokens == 256 and made.moments[-1].training, what="it is seen")
    assert stopped(program), "what has this number now may be another's"


async def test_a_program_that_was_started_anew_is_stopped_too(page: Page, program: subprocess.Popen[bytes]) -> None:
    pids = [program.pid]
    with pausing(page, lambda: pids[-1]) as made:
        await wait_until(lambda: stopped(program), what="the first")
        with start(SLEEP) as later:
            try:
                pids.append(later.pid)
                await wait_until(lambda: stopped(later), what="the second")
                assert not any(one.training for one in made.moments)
            finally:
                later.kill()
