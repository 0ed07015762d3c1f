"""Computes what a worker's next grant says: whether its engine may step, its memory and the forecast."""

import time
from collections.abc import Callable

from ebbtide.serving_guard.loans.borrower_table import BorrowerTable
from ebbtide.serving_guard.loans.loan import Loan
from ebbtide.serving_guard.loans.memory_budget import UNREADABLE, AllowedMemory, MemoryBudget
from ebbtide.types.grants import GRANT_S, Forecast, Grant, Residency


class GrantIssuer:
    """`idle_s(wake_s)`: how long borrowing will probably be possible, 0 if that does not pay for a wake-up of
    `wake_s`."""

    def __init__(
        self,
        borrowers: BorrowerTable,
        memory: MemoryBudget,
        *,
        idle_s: Callable[[float], float],
        forecast: Callable[[], Forecast],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._borrowers, self._memory = borrowers, memory
        self._idle_s, self._forecast, self._clock = idle_s, forecast, clock
        self._last: dict[str, AllowedMemory] = {}

    def allowed(self, loan: Loan) -> AllowedMemory:
        """The memory that the borrower may use now."""
        if loan.gone_at is not None:
            return AllowedMemory(0, "", Residency.AWAKE)
        return self._memory.allowed(self._clock(), loan.worker_id, idle_s=self._idle_s(loan.wake_s))

    def issue(self, loan: Loan, sequence: int) -> Grant:
        allowed = self.allowed(loan)
        may = self._borrowers.open and loan.granted(self._clock()) and allowed.phase != UNREADABLE
        return Grant(
            sequence=sequence,
            tokens=(loan.hello.step_tokens or 1) if may else 0,
            sequences=(loan.hello.slots or 1) if may else 0,
            expires_s=GRANT_S if may else 0.0,
            kv_bytes=allowed.kv_bytes,
            residency=allowed.residency,
            forecast=self._forecast(),
        )

    def send_changes(self) -> None:
        """Have grants sent before their time if the memory that a borrower may use has changed."""
        now = {loan.worker_id: self.allowed(loan) for loan in self._borrowers.all()}
        if now != self._last:
            self._last = now
            self._borrowers.news.set()
