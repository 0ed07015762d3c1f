"""Reports the device's state in one record."""

import time
from collections.abc import Callable

from ebbtide.loans.borrower_status import borrower_status
from ebbtide.loans.borrower_table import BorrowerTable
from ebbtide.loans.grant_issuer import GrantIssuer
from ebbtide.scheduling.elastic.device_ownership import DeviceOwnership
from ebbtide.serving_guard.trainer.loan_keeper import LoanKeeper
from ebbtide.types.grants import Borrower, GuardStatus
from ebbtide.types.loans import DeviceStatus


class DeviceReporter:
    """Reads the other parts; has no state of its own but when it began."""

    def __init__(
        self,
        ownership: DeviceOwnership,
        keeper: LoanKeeper,
        borrowers: BorrowerTable,
        issuer: GrantIssuer,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ownership, self._keeper, self._borrowers, self._issuer = ownership, keeper, borrowers, issuer
        self._clock, self._began = clock, clock()

    def now(self) -> DeviceStatus:
        now, keeper, owner = self._clock(), self._keeper, self._ownership.owner
        return DeviceStatus(
            state=keeper.state,
            run_id=owner.run_id if owner else "",
            lease=owner.lease if owner else 0,
            compute_back=keeper.back.compute,
            memory_back=keeper.back.memory,
            waits_for=keeper.back.waits_for,
            borrowers=self._tenants(now),
            forecast=keeper.forecast(),
            held_s=keeper.seconds["held"],
            lent_s=keeper.seconds["lent"],
            take_backs=keeper.take_backs,
            uptime_s=now - self._began,
        )

    def as_guard(self) -> GuardStatus:
        """The same for those who watch guards: a device whose trainer computes serves nobody."""
        now = self._clock()
        return GuardStatus(
            mode="trainer",
            state=self._keeper.state,
            borrowers=self._tenants(now),
            forecast=self._keeper.forecast(),
            uptime_s=now - self._began,
        )

    def _tenants(self, now: float) -> tuple[Borrower, ...]:
        return tuple(borrower_status(loan, self._issuer.allowed(loan), now) for loan in self._borrowers.all())
