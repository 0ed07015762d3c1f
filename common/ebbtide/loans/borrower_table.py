"""Keeps the workers that borrow here, by their ids.

Invariant: each id has one loan, that of its newest stream; an older loan of the same id ends at once. A loan whose
stream ended has no budget, and is watched (`parting`) until its engine stands still. Nothing outlives the process:
workers connect again and send Hello, and until then their grants have run out.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from ebbtide import telemetry
from ebbtide.errors import NotReady
from ebbtide.grants import Page, page_path
from ebbtide.loans import borrower_processes, metrics
from ebbtide.loans.loan import Loan, LoanAccount
from ebbtide.types.grants import GRANTS_VERSION, BorrowerReport, Budget, Hello
from ebbtide.types.ids import check_id

log = telemetry.get_logger(__name__)

#: Accounts kept of workers that have borrowed.
_ACCOUNTS: Final = 64
#: Beside one engine there is one worker, or a few.
_MOST: Final = 16


class BorrowerMemory(Protocol):
    """Divides memory between the owner and the borrowers. `now` is in seconds of the monotonic clock."""

    def joined(self, worker_id: str, hello: Hello) -> None:
        """Add a borrower, or replace it. Raises `InvalidRequest` if its device cannot be read."""
        ...

    def left(self, worker_id: str) -> None: ...

    def reported(self, now: float, worker_id: str, report: BorrowerReport) -> None: ...


class BorrowerTable:
    """Adds and ends loans, and tells `memory` and the subscribers of each change."""

    def __init__(self, folder: Path, memory: BorrowerMemory, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._memory, self._clock = folder, memory, clock
        self._loans: dict[str, Loan] = {}
        self._accounts: dict[str, LoanAccount] = {}
        self._subscribers: list[Callable[[], None]] = []
        self.parting: list[Loan] = []
        self.news = asyncio.Event()  # set when grants must be sent before their time
        self.open = True

    def all(self) -> list[Loan]:
        return list(self._loans.values())

    def subscribe(self, call: Callable[[], None]) -> None:
        """Call this after each change of a loan that may change how budgets are shared."""
        self._subscribers.append(call)

    def changed(self) -> None:
        for call in self._subscribers:
            call()

    def join(self, hello: Hello) -> Loan:
        """Begin the loan of a worker that sent Hello. Raises `InvalidRequest` or `NotReady` if it cannot borrow
        here."""
        if hello.protocol_version != GRANTS_VERSION:
            raise NotReady(f"this lender speaks version {GRANTS_VERSION} of the grants, not {hello.protocol_version}")
        check_id(hello.worker_id, field="hello.worker_id")
        old = self._loans.get(hello.worker_id)
        if old is None and len(self._loans) >= _MOST:
            raise NotReady(f"{_MOST} workers borrow here already")
        path = page_path(self._folder, hello.worker_id)
        page = Page(path)
        found = borrower_processes.checked(hello.pids, path)
        self._memory.joined(hello.worker_id, hello)
        loan = Loan(hello, found, page, self._account(hello.worker_id, found), self._clock())
        self._loans[hello.worker_id] = loan
        self.parting = [one for one in self.parting if one.worker_id != hello.worker_id]
        if old is not None:
            self.leave(old, "it connected again", watched=False)
        metrics.BORROWERS.set(len(self._loans))
        log.info("borrows", worker_id=hello.worker_id, pids=hello.pids, step_tokens=hello.step_tokens)
        self.changed()
        return loan

    def leave(self, loan: Loan, reason: str, *, watched: bool = True) -> None:
        """End a loan, as its stream ended or a newer one replaced it. A second call does nothing."""
        if loan.gone_at is not None:
            return
        loan.end(self._clock())
        if self._loans.get(loan.worker_id) is loan:
            del self._loans[loan.worker_id]
            self._memory.left(loan.worker_id)
        if watched:
            self.parting.append(loan)
        metrics.BORROWERS.set(len(self._loans))
        log.info("borrows no more", worker_id=loan.worker_id, reason=reason)
        self.news.set()
        self.changed()

    def forget(self, loan: Loan) -> None:
        """Watch a loan that has ended no longer."""
        if loan in self.parting:
            self.parting.remove(loan)

    def record_report(self, loan: Loan, report: BorrowerReport) -> None:
        if loan.gone_at is not None:
            return
        now = self._clock()
        before = (loan.granted(now), loan.wanted)
        loan.record_report(report, now)
        self._memory.reported(now, loan.worker_id, report)
        if before != (loan.granted(now), loan.wanted):
            self.changed()

    def close(self) -> None:
        """Take everything back: no step begins from now on."""
        self.open = False
        now = self._clock()
        for loan in self._loans.values():
            loan.write(Budget(), now)
        self.news.set()

    def _account(self, worker_id: str, found: tuple[borrower_processes.BorrowerProcess, ...]) -> LoanAccount:
        account = self._accounts.pop(worker_id, None) or LoanAccount()
        account.attach(found)
        self._accounts[worker_id] = account
        while len(self._accounts) > _ACCOUNTS:
            self._accounts.pop(next(iter(self._accounts)))
        return account
