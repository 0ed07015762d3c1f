"""The workers that borrow here, by their ids.

Invariant: one loan for each id, that of its newest stream; an older one of the same id is over at once. A loan whose
stream ended has no budget, and is watched (`parting`) until its engine stands still. Nothing outlives the process:
workers connect again and say Hello, and until then their grants have run out.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ebbtide import telemetry
from ebbtide.errors import NotReady
from ebbtide.grants import Page, page_path
from ebbtide.serving_guard import metrics
from ebbtide.serving_guard.loans import borrower_processes
from ebbtide.serving_guard.loans.loan import Loan, LoanAccount
from ebbtide.serving_guard.loans.memory_budget import UNREADABLE, AllowedMemory, MemoryBudget
from ebbtide.types.grants import (
    GRANT_S,
    GRANTS_VERSION,
    BorrowerReport,
    Budget,
    Forecast,
    Grant,
    Hello,
    Residency,
)
from ebbtide.types.ids import check_id

log = telemetry.get_logger(__name__)

#: Accounts of workers that were here once.
_ACCOUNTS: Final = 64
#: Beside one engine there is one worker, or a few.
_MOST: Final = 16


class BorrowerTable:
    """`memory`: what each may use of it, a `MemoryBudget` or one that is like it. `now` is of the monotonic clock."""

    def __init__(self, folder: Path, memory: MemoryBudget, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._memory, self._clock = folder, memory, clock
        self._loans: dict[str, Loan] = {}
        self._accounts: dict[str, LoanAccount] = {}
        self.parting: list[Loan] = []
        self.news = asyncio.Event()  # set when grants are to be sent before their time
        self.changed: Callable[[], None] = lambda: None  # somebody came, went or changed
        self.forecast: Callable[[], Forecast] = Forecast
        self.idle_s: Callable[[float], float] = lambda _: 0.0  # for how long, if that pays for a wake-up of so long
        self.open = True

    def all(self) -> list[Loan]:
        return list(self._loans.values())

    def join(self, hello: Hello) -> Loan:
        """A worker said Hello. Raises `InvalidRequest` or `NotReady` for one that cannot borrow here."""
        if hello.protocol_version != GRANTS_VERSION:
            raise NotReady(f"this guard speaks version {GRANTS_VERSION} of the grants, not {hello.protocol_version}")
        check_id(hello.worker_id, field="hello.worker_id")
        old = self._loans.get(hello.worker_id)
        if old is None and len(self._loans) >= _MOST:
            raise NotReady(f"{_MOST} workers borrow here already")
        path = page_path(self._folder, hello.worker_id)
        page = Page(path)
        found = borrower_processes.checked(hello.pids, path)
        self._memory.joined(hello.worker_id, hello)
        now = self._clock()
        loan = Loan(hello, found, page, self._account(hello.worker_id, found), now)
        if any(borrower_processes.stopped(process) for process in found):
            loan.stopped_at = now  # by a guard that is no more, or before it connected anew
        self._loans[hello.worker_id] = loan
        self.parting = [one for one in self.parting if one.worker_id != hello.worker_id]
        if old is not None:
            self.leave(old, "it connected anew", watched=False)
        metrics.BORROWERS.set(len(self._loans))
        log.info("borrows", worker_id=hello.worker_id, pids=hello.pids, step_tokens=hello.step_tokens)
        self.changed()
        return loan

    def leave(self, loan: Loan, reason: str, *, watched: bool = True) -> None:
        """Its stream ended, or another took its place. For the second time nothing happens."""
        if loan.gone_at is not None:
            return
        now = self._clock()
        loan.write(Budget(), now)
        loan.gone_at = now
        if self._loans.get(loan.worker_id) is loan:
            del self._loans[loan.worker_id]
            self._memory.left(loan.worker_id)
        if watched:
            self.parting.append(loan)
        metrics.BORROWERS.set(len(self._loans))
        log.info("borrows no more", worker_id=loan.worker_id, reason=reason)
        self.news.set()
        self.changed()

    def heard(self, loan: Loan, report: BorrowerReport) -> None:
        if loan.gone_at is not None:
            return
        now, before = self._clock(), (loan.granted(self._clock()), loan.wanted)
        loan.heard(report, now)
        self._memory.reported(now, loan.worker_id, report)
        if before != (loan.granted(now), loan.wanted):
            self.changed()

    def allowed(self, loan: Loan) -> AllowedMemory:
        """What of memory it may use now."""
        if loan.gone_at is not None:
            return AllowedMemory(0, "", Residency.AWAKE)
        return self._memory.allowed(self._clock(), loan.worker_id, idle_s=self.idle_s(loan.wake_s))

    def grant(self, loan: Loan, sequence: int) -> Grant:
        allowed, forecast = self.allowed(loan), self.forecast()
        may = self.open and loan.granted(self._clock()) and allowed.phase != UNREADABLE
        return Grant(
            sequence=sequence,
            tokens=(loan.hello.step_tokens or 1) if may else 0,
            sequences=(loan.hello.slots or 1) if may else 0,
            expires_s=GRANT_S if may else 0.0,
            kv_bytes=allowed.kv_bytes,
            residency=allowed.residency,
            forecast=forecast,
        )

    def close(self) -> None:
        """Take everything back: no step begins from now on."""
        self.open = False
        now = self._clock()
        for loan in self._loans.values():
            loan.write(Budget(), now)
        self.news.set()

    def _account(self, worker_id: str, found: tuple[borrower_processes.BorrowerProcess, ...]) -> LoanAccount:
        account = self._accounts.pop(worker_id, None) or LoanAccount()
        if account.pids != found:
            account.pids, account.strikes = found, []
        self._accounts[worker_id] = account
        while len(self._accounts) > _ACCOUNTS:
            self._accounts.pop(next(iter(self._accounts)))
        return account
