"""Carries out who has a trainer's device: engines have budgets while it is lent, and give it back when it is not.

Invariant: the pages hold a budget only while the device is lent. It ends soon and is renewed, so the engines stand
still by themselves if this process does. After a standstill, the owner's newest wish is read before anything is lent.
An engine that does not give memory up in time is killed. Lost with the process: the times since its start.
"""

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from ebbtide import telemetry
from ebbtide.errors import InvalidRequest
from ebbtide.grants import Page
from ebbtide.serving_guard import borrower_processes
from ebbtide.serving_guard.borrower_processes import BorrowerProcess
from ebbtide.serving_guard.borrowers import ENFORCED, BorrowerTable, Loan
from ebbtide.serving_guard.device_ownership import DeviceOwnership, LoanForecast
from ebbtide.types.grants import Budget, Forecast, Residency

log = telemetry.get_logger(__name__)

_RETURNS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)

DEVICE_HELD = telemetry.gauge("guard_device_held", "1 while the trainer has its device")
DEVICE_SECONDS = telemetry.counter(
    "guard_device_seconds_total",
    "seconds by who may use the device; `state`: held (the trainer), lent (rollout engines)",
    ("state",),
)
TAKE_BACKS = telemetry.counter("guard_take_backs_total", "times that the trainer took its device back")
COMPUTE_BACK_SECONDS = telemetry.histogram(
    "guard_compute_back_seconds", "a take-back until no engine steps any more", buckets=_RETURNS
)
MEMORY_BACK_SECONDS = telemetry.histogram(
    "guard_memory_back_seconds", "a take-back until engines have given up memory", buckets=_RETURNS
)
OWNERS_REFUSED = telemetry.counter(
    "guard_owners_refused_total",
    "trainers that were refused the device; `reason`: superseded (an older lease), owned (by another run)",
    ("reason",),
)


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
    boots: bool = False  # the processes are its worker's, as the engine's own are not there yet
    waits: bool = False  # nor do they have anything of the device


class ReturnWatch:
    """Watches whether engines gave the device back: first that none computes, then that they gave up memory. `held`:
    where weights are to be while the trainer has the device.

    What counts is what engines do, not what they say: their steps are read from the pages in the folder, also from
    those of workers without a stream, which may be starting, or may have lost a guard. An engine whose process is gone
    has given everything back. One that was killed has no page any more for a while before that.

    Invariant: `_grants` has the newest grant of each loan at the take-back. A worker's report counts as an answer if it
    follows a later grant. `_met` has the processes of all engines that were seen, until they are gone, and those of a
    worker whose engine boots, until it says that the engine is there. Nothing of this outlives the process.
    """

    def __init__(self, folder: Path, borrowers: BorrowerTable, held: Residency) -> None:
        self._folder, self._borrowers, self._held_at = folder, borrowers, held
        self._grants: dict[Loan, int] = {}
        self._met: dict[BorrowerProcess, DeviceTenant] = {}

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
        there = {process: one for one in found for process in one.processes}
        booted = {loan.worker_id for loan in self._borrowers.all() if loan.hello.slots}
        self._met = {
            process: one
            for process, one in (self._met | {key: one for key, one in there.items() if not one.waits}).items()
            if (process in there or borrower_processes.alive(process)) and not (one.boots and one.worker_id in booted)
        }
        yield from found
        for process, one in self._met.items():
            if process not in there:
                yield DeviceTenant(
                    worker_id=one.worker_id, processes=(process,), stepping=False, holding=self._gives_up()
                )

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
            boots=not loan.hello.slots,
            waits=loan.waits,
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


#: How often budgets are renewed, and while the device comes back, how often engines are looked at.
_RENEW_S: Final = 0.05
_LOOK_S: Final = 0.002
#: A budget lasts so long: four renewals may come late before an engine pauses.
_BUDGET_S: Final = 0.25
#: More than any engine can take in a step: its own limits count.
_ALL: Final = 1 << 20
#: Share by which the longest step seen fades at each later one: contexts grow and shrink.
_FADE: Final = 0.99
_NOTHING_BACK: Final = DeviceReturn()
#: After a standstill of this process, the owner's wishes of meanwhile are read for so long before anything is lent.
_STOOD_S: Final = 1.0
_CATCH_UP_S: Final = 0.25


class LoanKeeper:
    """`memory_s`: how long an engine may take to give up memory."""

    def __init__(
        self,
        ownership: DeviceOwnership,
        borrowers: BorrowerTable,
        returns: ReturnWatch,
        *,
        memory_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ownership, self._borrowers, self._returns = ownership, borrowers, returns
        self._memory_s, self._clock = memory_s, clock
        self._forecast = LoanForecast()
        self._closed = False
        self._lent = self._hand_over = False
        self._looked_at = clock()
        self._caught_up_at = self._looked_at
        self._taken_at = self._looked_at
        self._back = _NOTHING_BACK
        self._timed_compute = self._timed_memory = True
        self._compute_s, self._later_steps = 0.0, 0
        self._spell_steps = 0, 0.0  # engines' steps since the device was lent last, and their seconds in all
        self._holding: dict[str, float] = {}  # engines with memory to give up -> since when
        self.seconds = {"held": 0.0, "lent": 0.0}
        self.take_backs = 0
        self.step_s = 0.0  # the longest step lately
        borrowers.subscribe(self.review)

    @property
    def granting(self) -> bool:
        """Whether engines may compute."""
        return self._lent

    @property
    def back(self) -> DeviceReturn:
        """What engines gave back by now; nothing while the device is lent."""
        return self._back

    @property
    def state(self) -> str:
        return "closed" if self._closed else self._ownership.state(self._clock())

    def forecast(self) -> Forecast:
        found = self._forecast.forecast(self._clock())
        return replace(found, hand_over=True) if self._hand_over and not self._lent else found

    def close(self) -> None:
        """Take the device from engines for good."""
        self._closed = True
        self.review()

    def wished(self, spell_s: float, *, hand_over: bool = False) -> None:
        """The owner stated a new wish, which will probably stand for `spell_s`; 0: unknown. `hand_over`: while it has
        the device, rollouts are to go on elsewhere.
        """
        self._hand_over = hand_over
        self.review()
        self._forecast.turn(self._clock(), lent=self._lent, spell_s=spell_s)
        self._borrowers.news.set()

    def review(self) -> None:
        """Give or take the device as its ownership now says."""
        now = self._clock()
        if now - self._looked_at > _STOOD_S:
            self._caught_up_at = now + _CATCH_UP_S
        self._count(now)
        lends = not self._closed and self._ownership.lends(now) and now >= self._caught_up_at
        if self._lent and not lends:
            self._take_back(now)
        elif lends and not self._lent:
            self._lend(now)
        for loan in self._borrowers.all():
            fit = lends and loan.granted(now)
            loan.write(Budget(_ALL, _ALL, now + _BUDGET_S) if fit else Budget(), now, idle=fit)
        self._back = _NOTHING_BACK if lends else self._returned(now)

    async def run(self) -> None:
        """Renew budgets and watch engines, forever."""
        while True:
            self._learn()
            self.review()
            await asyncio.sleep(_RENEW_S if self._lent or self._back.memory else _LOOK_S)

    def _lend(self, now: float) -> None:
        self._lent, self._spell_steps = True, (0, 0.0)
        self._holding.clear()
        self._forecast.turn(now, lent=True)
        self._borrowers.news.set()
        log.info("device lent", state=self._ownership.state(now))

    def _take_back(self, now: float) -> None:
        self._lent, self._taken_at = False, now
        self._timed_compute = self._timed_memory = False
        self._returns.taken_back()
        for loan in self._borrowers.all():
            if loan.budget.tokens:
                loan.write(Budget(), now)
                loan.reclaimed(now)
        self._forecast.turn(now, lent=False)
        self.take_backs += 1
        TAKE_BACKS.inc()
        self._borrowers.news.set()
        log.info("device taken back", workers=len(self._borrowers.all()))

    def _returned(self, now: float) -> DeviceReturn:
        back = self._returns.look()
        if back.compute and not self._timed_compute:
            self._timed_compute, self._compute_s = True, now - self._taken_at
            COMPUTE_BACK_SECONDS.observe(self._compute_s)
            loans = self._borrowers.all()
            self._later_steps = max((one.page.steps().steps - one.steps_when_taken for one in loans), default=0)
        if back.memory and not self._timed_memory:
            self._timed_memory = True
            MEMORY_BACK_SECONDS.observe(now - self._taken_at)
            self._tell_back(now)
        self._press([] if back.memory else [one for one in self._returns.tenants() if one.holding or one.stepping], now)
        return back

    def _tell_back(self, now: float) -> None:
        count, seconds = self._spell_steps
        log.info(
            "device back",
            compute_s=self._compute_s,
            memory_s=now - self._taken_at,
            steps=self._later_steps,  # that ended after the take-back, of the engine with the most
            step_s=seconds / count if count else 0.0,
        )

    def _press(self, tenants: list[DeviceTenant], now: float) -> None:
        """Kill engines that do not give the device back in time."""
        self._holding = {one.worker_id: self._holding.get(one.worker_id, now) for one in tenants}
        for one in tenants:
            if now - self._holding[one.worker_id] > self._memory_s:
                sent = borrower_processes.send(one.processes, signal.SIGKILL)
                ENFORCED.labels("killed").inc()
                why = "its step does not end" if one.stepping else "it does not give up memory"
                log.warning("worker killed", worker_id=one.worker_id, reason=why, processes=sent)
                self._holding[one.worker_id] = inf  # one kill is enough; it is gone at the next look

    def _learn(self) -> None:
        """Learn how long steps take."""
        for loan in self._borrowers.all():
            for _, _, seconds in loan.new_steps():
                self.step_s = max(_FADE * self.step_s, seconds)
                count, sum_s = self._spell_steps
                self._spell_steps = count + 1, sum_s + seconds

    def _count(self, now: float) -> None:
        spent, self._looked_at = max(0.0, now - self._looked_at), now
        kind = "lent" if self._lent else "held"
        self.seconds[kind] += spent
        DEVICE_SECONDS.labels(kind).inc(spent)
        DEVICE_HELD.set(self._ownership.state(now) == "held")
