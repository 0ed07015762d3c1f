"""Says how much memory engines may use: all of theirs while the device is lent, and what the settings leave them while
the trainer has it.

An engine on a GPU comes back once the device has room for it: the trainer may still be moving its own memory away, or
have kept it. Until then its grants leave the weights where they are, so that it does not fail on its way.

Invariant: the wish in a grant follows the present state of the device. Memory that cannot be read counts as none.
Nothing of this outlives the process.
"""

import time
from collections.abc import Callable
from typing import Final

from ebbtide import telemetry
from ebbtide.loans.gpu_memory import Device, open_device
from ebbtide.loans.grant_issuer import AllowedMemory
from ebbtide.loans.loan import Loan
from ebbtide.types.grants import BorrowerReport, Hello, Residency

log = telemetry.get_logger(__name__)

_LENT: Final = "lent"
_HELD: Final = "held"
_CROWDED: Final = "crowded"
#: Share of a device's memory that stays free when an engine comes back: its steps allocate beyond its pool.
_RESERVE: Final = 0.02
#: While an engine waits for room, the reason is logged so often.
_TELL_S: Final = 30.0


class _Borrowing:
    def __init__(self, hello: Hello, device: Device | None) -> None:
        self.hello, self.device = hello, device
        self.residency = Residency.AWAKE
        self.told_at = float("-inf")


class PhasedMemory:
    """`lent()`: whether engines have the device now. `held`: where weights are to be while they have not."""

    def __init__(
        self,
        held: Residency,
        lent: Callable[[], bool],
        *,
        device: Callable[[str], Device] = open_device,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._held_at, self._lent, self._open, self._clock = held, lent, device, clock
        self._borrowers: dict[str, _Borrowing] = {}

    def joined(self, worker_id: str, hello: Hello) -> None:
        """Raises `InvalidRequest` for an engine whose device cannot be read, if it is to give memory up."""
        reads = hello.device and self._held_at is not Residency.AWAKE
        self._borrowers[worker_id] = _Borrowing(hello, self._open(hello.device) if reads else None)

    def left(self, worker_id: str) -> None:
        self._borrowers.pop(worker_id, None)

    def reported(self, now: float, worker_id: str, report: BorrowerReport) -> None:  # noqa: ARG002 - the interface
        if (borrower := self._borrowers.get(worker_id)) is not None:
            borrower.residency = report.residency

    def engine_bytes(self) -> int:
        """Of one device that the largest engine on a GPU needs to come back; 0: there is none, or none gives up."""
        return max((_needed(one.hello) for one in self._borrowers.values() if one.device is not None), default=0)

    def allowed(self, loan: Loan) -> AllowedMemory:
        """The memory in a borrower's next grant."""
        phase = _LENT if self._lent() else _HELD
        if self._held_at is Residency.AWAKE:
            return AllowedMemory(loan.hello.kv_bytes, phase, Residency.AWAKE)
        if phase is _HELD:
            return AllowedMemory(0, _HELD, self._held_at)
        borrower = self._borrowers.get(loan.worker_id)
        if borrower is not None and not self._fits(borrower):
            return AllowedMemory(0, _CROWDED, borrower.residency)
        return AllowedMemory(loan.hello.kv_bytes, _LENT, Residency.AWAKE)

    def _fits(self, borrower: _Borrowing) -> bool:
        """Whether the engine has its memory, or the device has room for it."""
        if borrower.device is None or borrower.residency is Residency.AWAKE:
            return True
        needed, free, total = _needed(borrower.hello), 0, 0
        try:
            free, total = borrower.device.memory()
        except Exception as error:  # noqa: BLE001 - whatever fails in NVML, the trainer goes on
            self._tell(borrower, needed, reason=str(error))
            return False
        fits = free >= needed + int(_RESERVE * total)
        if not fits:
            self._tell(borrower, needed, free=free)
        return fits

    def _tell(self, borrower: _Borrowing, needed: int, **facts: object) -> None:
        if self._clock() - borrower.told_at > _TELL_S:
            borrower.told_at = self._clock()
            log.warning("an engine waits for memory", worker_id=borrower.hello.worker_id, needed=needed, **facts)


def _needed(hello: Hello) -> int:
    return hello.weights_bytes + hello.kv_bytes
