"""A loan writes its budget into the page and measures reclaims, and an engine cannot veto a hand-back."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ebbtide.errors import InvalidRequest
from ebbtide.grants import Page, page_path
from ebbtide.serving_guard import borrower_processes
from ebbtide.serving_guard.borrower_processes import BorrowerProcess
from ebbtide.serving_guard.borrowers import BorrowerTable, Loan, LoanAccount
from ebbtide.serving_guard.lender import Enforcer
from ebbtide.serving_guard.memory_budget import MemoryBudget
from ebbtide.types.grants import GRANTS_VERSION, Budget, Hello

#: A process that has mapped the page.
MAPS = (
    "import mmap, sys, time; f=open(sys.argv[1], 'r+b'); m=mmap.mmap(f.fileno(), 0); print(flush=True); time.sleep(9)"
)
YIELD_S, KILL_S, STEP_S = 0.25, 5.0, 0.01


class Scene:
    """One borrower whose engine is this test, and a clock that this test moves."""

    def __init__(self, folder: Path, pid: int) -> None:
        self.engine = Page(page_path(folder, "w"), create=True)
        self.engine.enter(os.getpid(), 8)
        self.engine.renew(time.monotonic() + 600)
        self.now = time.monotonic()
        self.granting = True
        self.sent: list[signal.Signals] = []
        self.starved = 0.0  # part of the time in which the engine waits for a core
        self.borrowers = BorrowerTable(folder, MemoryBudget(), clock=lambda: self.now)
        hello = Hello(protocol_version=GRANTS_VERSION, worker_id="w", pids=(pid,), slots=4, step_tokens=32)
        self.loan: Loan = self.borrowers.join(hello)
        self.enforcer = Enforcer(
            self.borrowers,
            yield_s=YIELD_S,
            kill_s=KILL_S,
            most=2,
            predicted_s=lambda: STEP_S,
            granting=lambda: self.granting,
            clock=lambda: self.now,
            send=self.send,
            waits=lambda _: {1: 0.0, 2: self.starved * self.now},
        )
        self.grant(granted=True)

    def send(self, found: Iterable[BorrowerProcess], number: signal.Signals) -> int:
        self.sent.append(number)
        return len(tuple(found))

    def grant(self, *, granted: bool) -> None:
        self.granting = granted
        self.loan.write(Budget(8, 2, self.now + 600) if granted else Budget(), self.now)

    def check(self, later_s: float = 0.0) -> list[signal.Signals]:
        """Check the engine for `later_s`; returns the signals sent."""
        self.sent.clear()
        end = self.now + later_s
        self.enforcer.check()
        while self.now < end:
            self.now = min(end, self.now + 0.05)
            self.enforcer.check()
        return list(self.sent)

    def step_without_budget(self) -> None:
        """Begin steps without a budget."""
        for _ in range(2):
            self.engine.begin_step(heeding=False)
            self.engine.end_step(1)


@contextmanager
def mapping(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    page = page_path(folder, "w")
    Page(page, create=True).close()
    command = [sys.executable, "-ISc", MAPS, str(page)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as worker:
        assert worker.stdout
        worker.stdout.readline()
        try:
            yield worker
        finally:
            worker.kill()


def process_of(program: subprocess.Popen[bytes]) -> BorrowerProcess:
    fields = Path(f"/proc/{program.pid}/stat").read_text().rpartition(")")[2].split()
    return BorrowerProcess(program.pid, int(fields[19]))


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with mapping(tmp_path) as worker:
        yield Scene(tmp_path, worker.pid)


def test_an_engine_that_ends_its_step_in_time_is_left_alone(scene: Scene) -> None:
    scene.engine.begin_step()
    scene.grant(granted=False)
    assert scene.check(YIELD_S) == []
    scene.engine.end_step(4)
    assert scene.check(10.0) == []


def test_a_step_beyond_its_bound_is_stopped_and_continued_with_the_next_budget(scene: Scene) -> None:
    scene.engine.begin_step()
    scene.grant(granted=False)
    assert scene.check(YIELD_S + STEP_S + 0.1) == [signal.SIGSTOP]
    assert not scene.loan.granted(scene.now)
    scene.granting = True
    assert scene.check(0.2) == [signal.SIGCONT]
    assert scene.loan.granted(scene.now)


def test_a_step_is_not_late_by_the_time_in_which_it_waited_for_a_core(scene: Scene) -> None:
    scene.starved = 0.9
    scene.engine.begin_step()
    scene.grant(granted=False)
    assert scene.check(5 * YIELD_S) == []
    assert scene.check(6 * YIELD_S) == [signal.SIGSTOP]


def test_an_engine_with_a_thread_that_always_waits_is_stopped_all_the_same(scene: Scene) -> None:
    scene.starved = 1.0
    scene.engine.begin_step()
    scene.grant(granted=False)
    assert scene.check(KILL_S) == []
    assert scene.check(YIELD_S + STEP_S + 0.1) == [signal.SIGSTOP]


def test_a_step_behind_a_late_one_has_waited_for_nothing_yet(scene: Scene) -> None:
    scene.starved = 0.9
    scene.engine.begin_step()
    scene.grant(granted=False)
    assert scene.check(2 * YIELD_S) == []
    scene.engine.end_step(4)
    scene.starved = 0.0
    scene.grant(granted=True)
    scene.engine.begin_step()
    scene.grant(granted=False)
    assert scene.check(2 * YIELD_S) == [signal.SIGSTOP]


def test_threads_tell_how_long_they_waited_for_a_core() -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        waits = borrower_processes.core_waits((process_of(other),))
        other.kill()
    assert list(waits) == [other.pid]
    assert 0.0 <= waits[other.pid] < 60.0
    assert borrower_processes.core_waits((BorrowerProcess(2**22 - 1, 0),)) == {}


def test_one_stopped_without_a_budget_for_too_long_is_killed(scene: Scene) -> None:
    scene.engine.begin_step()
    scene.grant(granted=False)
    assert scene.check(KILL_S + 1) == [signal.SIGSTOP, signal.SIGKILL]
    assert scene.borrowers.all() == []


def test_steps_that_begin_without_a_budget_are_stopped_at_once(scene: Scene) -> None:
    scene.grant(granted=False)
    scene.step_without_budget()
    assert scene.check() == [signal.SIGSTOP]


def test_the_step_that_had_just_begun_is_no_defiance(scene: Scene) -> None:
    scene.engine.begin_step()
    scene.grant(granted=False)
    scene.engine.end_step(4)
    assert scene.check() == []


def test_who_defies_too_often_is_killed_even_if_it_connects_anew(scene: Scene) -> None:
    for _ in range(2):
        scene.grant(granted=False)
        scene.step_without_budget()
        assert scene.check() == [signal.SIGSTOP]
        scene.grant(granted=True)
        assert scene.check(0.2) == [signal.SIGCONT]
        scene.loan = scene.borrowers.join(scene.loan.hello)
    scene.grant(granted=True)
    scene.grant(granted=False)
    scene.step_without_budget()
    assert scene.check() == [signal.SIGKILL]


def test_an_engine_that_steps_on_behind_its_stream_is_killed(scene: Scene) -> None:
    scene.borrowers.leave(scene.loan, "its stream ended")
    assert scene.check(0.1) == []
    scene.step_without_budget()
    assert scene.check() == [signal.SIGKILL]
    assert scene.borrowers.parting == []


def test_one_that_comes_back_is_judged_by_its_new_stream(scene: Scene) -> None:
    scene.borrowers.leave(scene.loan, "its stream broke")
    scene.loan = scene.borrowers.join(scene.loan.hello)
    scene.grant(granted=True)
    scene.step_without_budget()
    assert scene.check(5.0) == []


def test_an_engine_that_stands_behind_its_stream_is_forgotten(scene: Scene) -> None:
    scene.borrowers.leave(scene.loan, "its stream ended")
    assert scene.check(5.0) == []
    assert scene.borrowers.parting == []


def test_one_that_loses_its_stream_while_it_is_stopped_is_killed(scene: Scene) -> None:
    scene.grant(granted=False)
    scene.step_without_budget()
    assert scene.check() == [signal.SIGSTOP]
    scene.borrowers.leave(scene.loan, "its stream broke")
    assert scene.check() == [signal.SIGKILL]


def test_a_guard_that_leaves_continues_whom_it_stopped(scene: Scene) -> None:
    scene.grant(granted=False)
    scene.step_without_budget()
    scene.check()
    scene.enforcer.close()
    assert scene.sent == [signal.SIGSTOP, signal.SIGCONT]


@pytest.mark.parametrize("pid", [0, 1, os.getpid(), 2**22 - 1], ids=["none", "init", "own", "unknown"])
def test_no_worker_names_processes_that_are_not_its_own(pid: int) -> None:
    with pytest.raises(InvalidRequest, match=r"hello\.pids"):
        borrower_processes.checked((pid,), Path("w.page"))


def test_a_process_that_does_not_share_the_page_is_never_taken_for_a_worker(tmp_path: Path) -> None:
    with mapping(tmp_path) as worker, subprocess.Popen(["sleep", "60"]) as stranger:
        page = page_path(tmp_path, "w")
        assert [one.pid for one in borrower_processes.checked((worker.pid,), page)] == [worker.pid]
        with pytest.raises(InvalidRequest, match=r"hello\.pids.*w\.page"):
            borrower_processes.checked((worker.pid, stranger.pid), page)
        stranger.kill()


def test_a_signal_reaches_a_process_and_all_below_it() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 60 & wait"], start_new_session=True) as parent:
        try:
            found = process_of(parent)
            while len(family := list(borrower_processes.with_children((found,)))) < 2:
                time.sleep(0)
            assert borrower_processes.send((found,), signal.SIGSTOP) == 2
            while not all(borrower_processes.stopped(one) for one in family):
                time.sleep(0)
        finally:
            os.killpg(parent.pid, signal.SIGKILL)
    assert not borrower_processes.alive(found)


def test_a_pid_that_another_process_got_is_not_signalled() -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        found = process_of(other)
        assert borrower_processes.send((BorrowerProcess(found.pid, found.started - 1),), signal.SIGKILL) == 0
        assert other.poll() is None
        other.kill()


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    made = Page(tmp_path / "w.page", create=True)
    made.enter(1, 10)
    made.renew(time.monotonic() + 60)
    yield made
    made.close()


def lent(page: Page) -> Loan:
    hello = Hello(protocol_version=GRANTS_VERSION, worker_id="w", slots=8, step_tokens=64)
    return Loan(hello, (), page, LoanAccount(), time.monotonic())


def test_a_budget_that_is_about_to_end_is_written_again_though_its_end_hardly_moves(page: Page) -> None:
    loan, now = lent(page), time.monotonic()
    loan.write(Budget(8, 8, now + 0.005), now)
    loan.write(Budget(8, 8, now + 0.012), now)

    assert page.offered().until == pytest.approx(now + 0.012)


def test_the_same_budget_is_written_again_when_somebody_comes_in(page: Page) -> None:
    loan, now = lent(page), time.monotonic()
    loan.write(Budget(8, 8, now + 10), now, idle=True)
    assert page.idle()
    loan.write(Budget(8, 8, now + 10), now)
    assert page.offered().tokens
    assert not page.idle()


def test_a_step_that_began_between_an_arrival_and_the_take_back_is_waited_for(page: Page) -> None:
    loan, now = lent(page), time.monotonic()
    loan.write(Budget(8, 8, now + 10), now)
    arrived = time.monotonic()
    assert page.begin_step().tokens
    loan.write(Budget(), arrived)
    loan.reclaimed(arrived)
    list(loan.new_steps())
    met = loan.yielding

    page.end_step(8)
    list(loan.new_steps())

    assert met
    assert list(loan.account.latencies) == [pytest.approx(page.steps().ended - arrived)]


def test_a_reclaim_that_meets_no_step_is_counted_and_flatters_no_percentile(page: Page) -> None:
    loan, now = lent(page), time.monotonic()
    loan.write(Budget(8, 8, now + 10), now)
    loan.write(Budget(), now)
    loan.reclaimed(now)

    assert (loan.account.reclaims, list(loan.account.latencies)) == (1, [])
