"""Carries out who has the device: gives engines budgets while it is lent, and sees that they end when it is not.

Invariant: the pages hold a budget only while the device is lent. It ends soon and is renewed, so the engines stand
still by themselves if this process does. After a standstill, the owner's newest wish is read before anything is lent.
An engine that does not give memory up in time is killed. Lost with the process: the times since its start.
"""

import asyncio
import signal
import time
from collections.abc import Callable
from math import inf
from typing import Final

from msgspec.structs import replace

from ebbtide import telemetry
from ebbtide.loans import borrower_processes
from ebbtide.loans import metrics as loan_metrics
from ebbtide.loans.borrower_table import BorrowerTable
from ebbtide.scheduling.elastic.device_ownership import DeviceOwnership
from ebbtide.scheduling.elastic.loan_forecast import LoanForecast
from ebbtide.serving_guard.trainer import metrics
from ebbtide.serving_guard.trainer.return_watch import DeviceReturn, DeviceTenant, ReturnWatch
from ebbtide.types.grants import Budget, Forecast

log = telemetry.get_logger(__name__)

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
        metrics.TAKE_BACKS.inc()
        self._borrowers.news.set()
        log.info("device taken back", workers=len(self._borrowers.all()))

    def _returned(self, now: float) -> DeviceReturn:
        back = self._returns.look()
        if back.compute and not self._timed_compute:
            self._timed_compute, self._compute_s = True, now - self._taken_at
            metrics.COMPUTE_BACK_SECONDS.observe(self._compute_s)
            loans = self._borrowers.all()
            self._later_steps = max((one.page.steps().steps - one.steps_when_taken for one in loans), default=0)
        if back.memory and not self._timed_memory:
            self._timed_memory = True
            metrics.MEMORY_BACK_SECONDS.observe(now - self._taken_at)
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
                loan_metrics.ENFORCED.labels("killed").inc()
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
        metrics.DEVICE_SECONDS.labels(kind).inc(spent)
        metrics.DEVICE_HELD.set(self._ownership.state(now) == "held")
