"""Watches whether engines gave the device back: first that none computes, then that they gave up memory.

What counts is what engines do, not what they say: their steps are read from the pages in the folder, also from those of
workers without a stream, which may be starting, or may have lost a guard. An engine whose process is gone has given
everything back. One that was killed has no page any more for a while before that.

Invariant: `_grants` has the newest grant of each loan at the take-back. A worker's report counts as an answer if it
follows a later grant. `_met` has the processes of all engines that were seen, until they are gone. Nothing of this
outlives the process.
"""

from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from ebbtide.errors import InvalidRequest
from ebbtide.grants import Page
from ebbtide.loans import borrower_processes
from ebbtide.loans.borrower_processes import BorrowerProcess
from ebbtide.loans.borrower_table import BorrowerTable
from ebbtide.loans.loan import Loan
from ebbtide.types.grants import Residency


class DeviceReturn(Struct, frozen=True, kw_only=True):
    """What engines gave back by now."""

    compute: bool = False
    memory: bool = False
    waits_for: str = ""


class DeviceTenant(Struct, frozen=True, kw_only=True):
    """An engine that lives on the device."""

    worker_id: str
    processes: tuple[BorrowerProcess, ...]
    stepping: bool
    holding: bool  # it has memory that it was to give up


class ReturnWatch:
    """`held`: where weights are to be while the trainer has the device."""

    def __init__(self, folder: Path, borrowers: BorrowerTable, held: Residency) -> None:
        self._folder, self._borrowers, self._held_at = folder, borrowers, held
        self._grants: dict[Loan, int] = {}
        self._met: dict[BorrowerProcess, str] = {}  # the workers' names

    def taken_back(self) -> None:
        """From now on engines have to give the device back."""
        self._grants = {loan: loan.issued for loan in self._borrowers.all()}

    def look(self) -> DeviceReturn:
        """What was given back since `taken_back`."""
        tenants = list(self.tenants())
        steps = [one.worker_id for one in tenants if one.stepping]
        holds = [one.worker_id for one in tenants if one.holding]
        awaited = [f"the step of {one}" for one in steps] + [f"the memory of {one}" for one in holds]
        return DeviceReturn(compute=not steps, memory=not awaited, waits_for=", ".join(dict.fromkeys(awaited)))

    def tenants(self) -> Iterator[DeviceTenant]:
        """All engines of the folder whose processes live."""
        found = list(self._present())
        there = {process: one.worker_id for one in found for process in one.processes}
        self._met = {
            process: name
            for process, name in (self._met | there).items()
            if process in there or borrower_processes.alive(process)
        }
        yield from found
        for process, name in self._met.items():
            if process not in there:
                yield DeviceTenant(worker_id=name, processes=(process,), stepping=False, holding=self._gives_up())

    def _present(self) -> Iterator[DeviceTenant]:
        loans = self._borrowers.all()
        for loan in loans:
            if any(map(borrower_processes.alive, loan.processes)):
                yield self._lent_to(loan)
        known = {loan.worker_id for loan in loans}
        for path in self._folder.glob("*.page"):
            if path.stem not in known and (found := self._stray(path)) is not None:
                yield found

    def _lent_to(self, loan: Loan) -> DeviceTenant:
        return DeviceTenant(
            worker_id=loan.worker_id,
            processes=loan.processes,
            stepping=loan.stepping_since() is not None,
            holding=self._holds(loan),
        )

    def _holds(self, loan: Loan) -> bool:
        if not self._gives_up() or not loan.hello.kv_bytes:
            return False
        report = loan.report
        if loan.stopped_at is not None:  # in the middle of a step, whatever its worker says
            return True
        if report is None or report.moving or report.residency is Residency.AWAKE:
            return True
        return 0 < report.grant <= self._grants.get(loan, 0)

    def _stray(self, path: Path) -> DeviceTenant | None:
        """The engine of a page whose worker has no stream; None if there is none."""
        try:
            page = Page(path)
        except InvalidRequest:  # it was removed meanwhile
            return None
        try:
            steps = page.steps()
        finally:
            page.close()
        try:
            processes = borrower_processes.checked([steps.pid], path)
        except InvalidRequest:
            return None
        stopped = borrower_processes.stopped(processes[0])
        return DeviceTenant(
            worker_id=path.stem,
            processes=processes,
            stepping=steps.stepping and not stopped,
            holding=self._gives_up(),
        )

    def _gives_up(self) -> bool:
        """Whether engines have to give memory up."""
        return self._held_at is not Residency.AWAKE
