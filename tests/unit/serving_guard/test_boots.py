"""A guard knows of an engine before it boots: it owes nothing then, and nothing that the page still says is its own."""

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from ebbtide.errors import InvalidRequest
from ebbtide.grants import Page, page_path
from ebbtide.rollout_worker.engine.vllm.borrowed_engine import BorrowedEngine
from ebbtide.serving_guard import borrower_processes
from ebbtide.serving_guard.borrower_processes import BorrowerProcess
from ebbtide.serving_guard.borrowers import BorrowerTable, Loan
from ebbtide.serving_guard.lender import Enforcer
from ebbtide.serving_guard.loan_keeper import ReturnWatch
from ebbtide.serving_guard.memory_budget import MemoryBudget
from ebbtide.types.grants import GRANTS_VERSION, BorrowerReport, Budget, Hello, Residency

#: No process has such a number.
WORKER, CORE = 1 << 28, (1 << 28) + 1
WAITS = BorrowerReport(residency=Residency.AWAY)
BOOTS = BorrowerReport(residency=Residency.AWAY, moving=True)


class Host:
    """A guard's table, and the page of a worker whose two processes live."""

    def __init__(self, folder: Path) -> None:
        self.engine = BorrowedEngine(page_path(folder, "w"), 64)
        self.borrowers = BorrowerTable(folder, MemoryBudget())
        self.returns = ReturnWatch(folder, self.borrowers, Residency.AWAY)

    def join(self, *pids: int, slots: int = 0, report: BorrowerReport | None = None) -> Loan:
        hello = Hello(
            protocol_version=GRANTS_VERSION, worker_id="w", pids=pids, slots=slots, step_tokens=64, kv_bytes=1
        )
        loan = self.borrowers.join(hello)
        if report is not None:
            self.borrowers.record_report(loan, report)
        return loan

    def awaited(self) -> str:
        return self.returns.look().waits_for


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    def checked(pids: Iterable[int], _: Path) -> tuple[BorrowerProcess, ...]:
        if not all(pids):
            raise InvalidRequest("no engine has written its process into the page", field="hello.pids")
        return tuple(BorrowerProcess(pid, 1) for pid in pids)

    monkeypatch.setattr(borrower_processes, "checked", checked)
    monkeypatch.setattr(borrower_processes, "alive", lambda process: process.pid in {WORKER, CORE})
    return Host(tmp_path)


def test_a_worker_that_booted_owes_only_what_its_engine_has(host: Host) -> None:
    host.join(WORKER, report=WAITS)
    assert not host.awaited(), "nothing of it is there"
    host.join(WORKER, report=BOOTS)
    assert host.awaited() == "the memory of w"
    host.join(CORE, slots=8, report=BorrowerReport(residency=Residency.AWAKE))
    assert host.awaited() == "the memory of w"
    host.join(CORE, slots=8, report=BorrowerReport(residency=Residency.HOST))
    assert not host.awaited(), "the worker's own process lives on, and has nothing of the device"


def test_a_worker_without_a_stream_owes_what_it_boots_with_and_nothing_while_it_waits(host: Host) -> None:
    loan = host.join(WORKER, report=WAITS)
    host.awaited()
    host.borrowers.leave(loan, "its stream broke")
    assert not host.awaited()
    loan = host.join(WORKER, report=BOOTS)
    host.awaited()
    host.borrowers.leave(loan, "its stream broke")
    assert host.awaited() == "the memory of w"


def test_a_step_in_which_a_former_engine_was_killed_is_not_held_against_the_next_one(host: Host) -> None:
    host.engine.page.enter(os.getpid(), 8)
    host.engine.page.begin_step(heeding=False)
    sent: list[signal.Signals] = []
    now = time.monotonic()

    def send(_: Iterable[BorrowerProcess], number: signal.Signals) -> int:
        sent.append(number)
        return 1

    enforcer = Enforcer(
        host.borrowers,
        yield_s=0.25,
        kill_s=5.0,
        most=2,
        predicted_s=lambda: 0.01,
        granting=lambda: False,
        clock=lambda: now,
        send=send,
        waits=lambda _: {},
    )
    loan = host.join(WORKER, report=WAITS)
    loan.taken_at = now - 60.0
    enforcer.check()
    assert not sent
    assert host.returns.look().compute
    host.join(CORE, slots=8, report=BorrowerReport()).taken_at = now - 60.0
    assert not host.returns.look().compute, "of an engine that is there it counts"
    now += 60.0
    enforcer.check()
    assert sent == [signal.SIGSTOP]


def test_a_guard_that_comes_back_leaves_a_warm_up_its_budget(host: Host) -> None:
    with host.engine.warming_up():
        loan = host.join(WORKER, report=None)
        loan.write(Budget(8, 8, time.monotonic() + 60), time.monotonic())
        assert not loan.granted(time.monotonic())
        host.borrowers.record_report(loan, BOOTS)
        loan.write(Budget(), time.monotonic())
        assert host.engine.page.budget().tokens == 64
        host.borrowers.leave(loan, "its stream broke")
        assert host.engine.page.budget().tokens == 64
        host.join(CORE, slots=8)
        assert Page(host.engine.path).budget() == Budget(), "once the engine is there the page is the guard's"
