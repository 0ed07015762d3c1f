"""Says how much memory engines may use: all of theirs while the device is lent, and what the settings leave them while
the trainer has it.

Invariant: the wish in a grant follows the present state of the device. Nothing of this outlives the process.
"""

from collections.abc import Callable
from typing import Final

from ebbtide.errors import InvalidRequest
from ebbtide.loans.grant_issuer import AllowedMemory
from ebbtide.loans.loan import Loan
from ebbtide.types.grants import BorrowerReport, Hello, Residency

_LENT: Final = "lent"
_HELD: Final = "held"


class PhasedMemory:
    """`lent()`: whether engines have the device now. `held`: where weights are to be while they have not."""

    def __init__(self, held: Residency, lent: Callable[[], bool]) -> None:
        self._held_at, self._lent = held, lent

    def joined(self, worker_id: str, hello: Hello) -> None:  # noqa: ARG002 - the table's interface
        """Raises `InvalidRequest` for an engine that cannot give up what the settings say."""
        if hello.device and self._held_at is not Residency.AWAKE:
            text = (
                f"an engine on a GPU ({hello.device}) gives no memory back; start the device-arbiter with --give-up "
                "nothing, and give trainer and engine shares of its memory that fit beside each other"
            )
            raise InvalidRequest(text, field="hello.device")

    def left(self, worker_id: str) -> None:
        """Nothing is kept of a borrower."""

    def reported(self, now: float, worker_id: str, report: BorrowerReport) -> None:
        """Nothing is kept of a report."""

    def allowed(self, loan: Loan) -> AllowedMemory:
        """The memory in a borrower's next grant."""
        if self._lent() or self._held_at is Residency.AWAKE:
            return AllowedMemory(loan.hello.kv_bytes, _LENT if self._lent() else _HELD, Residency.AWAKE)
        return AllowedMemory(0, _HELD, self._held_at)
