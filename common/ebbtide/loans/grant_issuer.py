"""Computes what a worker's next grant says: whether its engine may step, its memory and the forecast."""

import time
from collections.abc import Callable
from typing import Final

from msgspec import Struct

from ebbtide.loans.borrower_table import BorrowerTable
from ebbtide.loans.loan import Loan
from ebbtide.types.grants import GRANT_S, Forecast, Grant, Residency

#: The phase of a borrower while its device or host cannot be read: nothing is granted to it.
UNREADABLE: Final = "unreadable"


class AllowedMemory(Struct, frozen=True):
    """The memory in one borrower's grant."""

    kv_bytes: int
    phase: str  # one of the lender's, or `UNREADABLE`
    residency: Residency


class GrantIssuer:
    """`memory(loan)`: what a borrower may use now. `forecast()`: what borrowers may expect."""

    def __init__(
        self,
        borrowers: BorrowerTable,
        *,
        memory: Callable[[Loan], AllowedMemory],
        forecast: Callable[[], Forecast],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._borrowers, self._memory = borrowers, memory
        self._forecast, self._clock = forecast, clock
        self._last: dict[str, AllowedMemory] = {}

    def allowed(self, loan: Loan) -> AllowedMemory:
        """The memory that the borrower may use now."""
        return AllowedMemory(0, "", Residency.AWAKE) if loan.gone_at is not None else self._memory(loan)

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
