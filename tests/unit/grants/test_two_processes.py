"""With guard and engine in two processes, a reclaimed budget begins no step, and a new one takes effect at once."""

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebbtide.grants import Page
from ebbtide.types.grants import Budget
from tests.support.waiting import wait_until

STEPPER = Path(__file__).with_name("stepper.py")
ROUNDS = 40
#: On a machine that does other work too; alone it is a tenth of a millisecond.
SOON_S = 0.005


class Engine:
    def __init__(self, page: Page, process: subprocess.Popen[str]) -> None:
        self.page, self.process = page, process

    def free(self) -> None:
        self.page.write_budget(Budget(8, 8, 1e9))

    async def steps(self, more: int = 1) -> None:
        """Wait for `more` further steps."""
        goal = self.page.steps().steps + more
        await wait_until(lambda: self.page.steps().steps >= goal, interval=0.001)

    async def freeze(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)
        await wait_until(lambda: self._stat()[0] == "T", interval=0.001)

    def thaw(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def cpu_s(self) -> float:
        fields = self._stat()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _stat(self) -> list[str]:
        return Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """One that steps whenever it may; it has a lease."""
    path = tmp_path / "w1.page"
    page = Page(path, create=True)
    page.renew(1e9)
    with subprocess.Popen([sys.executable, str(STEPPER), str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield Engine(page, process)
        process.kill()


async def test_no_step_begins_once_the_budget_was_taken_away(engine: Engine) -> None:
    page = engine.page
    for _ in range(ROUNDS):
        engine.free()
        await engine.steps(2)
        page.write_budget(Budget())
        taken = time.monotonic()
        await wait_until(lambda: not page.steps().stepping, interval=0.0005)
        made = page.steps()
        assert made.began <= taken, "a step began behind its guard's back"
        assert page.await_budget(0.01) == Budget()
        assert page.steps() == made


async def test_no_step_begins_once_the_lease_ran_out(engine: Engine) -> None:
    page = engine.page
    engine.free()
    await engine.steps()
    end = time.monotonic() + 0.05
    page.renew(end)
    await wait_until(lambda: page.budget() == Budget() and not page.steps().stepping)
    made = page.steps()
    assert made.began <= end
    assert page.await_budget(0.02) == Budget()
    assert page.steps() == made


async def test_a_waiting_engine_steps_within_milliseconds_of_its_budget(engine: Engine) -> None:
    page, took = engine.page, []
    for _ in range(ROUNDS):
        page.write_budget(Budget())
        await wait_until(lambda: not page.steps().stepping, interval=0.0005)
        given = time.monotonic()
        engine.free()
        await wait_until(lambda given=given: page.steps().began >= given, interval=0.0005)  # type: ignore[misc]
        took.append(page.steps().began - given)
    assert statistics.median(took) < SOON_S, took


async def test_a_waiting_engine_uses_no_processor(engine: Engine) -> None:
    page = engine.page
    assert page.await_budget(0.2) == Budget()  # its start is over
    used, begun = engine.cpu_s(), time.monotonic()
    assert page.await_budget(1.0) == Budget()
    assert engine.cpu_s() - used <= 0.02 * (time.monotonic() - begun)


async def test_a_frozen_engine_is_seen_to_step_still_and_goes_on_where_it_was(engine: Engine) -> None:
    page = engine.page
    engine.free()
    while True:
        await engine.freeze()
        if (frozen := page.steps()).running:  # in mid-step; outside, it is about to withdraw or to count the step
            break
        engine.thaw()
        await engine.steps()
    page.write_budget(Budget())
    assert page.steps() == frozen
    engine.thaw()
    await wait_until(lambda: not page.steps().stepping)
    assert page.steps().steps == frozen.steps + 1
