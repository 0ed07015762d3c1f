"""Stops and kills engines that go on after their budget was taken back: an engine cannot veto a hand-back.

Invariant: an engine without a budget runs no longer than its predicted step and `yield_s`. Then its processes and all
their children are stopped (SIGSTOP). Time in which it waited for a core does not count, up to `kill_s`: where other
programs take the cores, its step is late, but takes nothing from the owner. A stopped engine is continued when there
is a budget again, because it finishes its step first. It is killed (SIGKILL) if there is no budget for `kill_s`, if it
was stopped `most` times lately, or if its stream ended meanwhile. Its rollouts continue elsewhere: the coordinator gets
no more tokens, or sees its worker go.
"""

import asyncio
import signal
import time
from collections.abc import Callable, Iterable
from typing import Final

from msgspec import Struct

from ebbtide import telemetry
from ebbtide.loans import borrower_processes, metrics
from ebbtide.loans.borrower_processes import BorrowerProcess
from ebbtide.loans.borrower_table import BorrowerTable
from ebbtide.loans.loan import Loan

log = telemetry.get_logger(__name__)

#: How often engines are checked: while a step goes on without a budget, and otherwise.
_SUSPECT_S: Final = 0.01
_LOOK_S: Final = 0.05
#: A stopped engine is continued once there has been a budget for this long: then its step fits into idle time.
_CALM_S: Final = 0.1
#: One step may begin as the budget is taken. A second one is no accident.
_ACCIDENTS: Final = 1
#: How long an engine is watched after its stream ended.
_PARTING_S: Final = 2.0


class LateStep(Struct, frozen=True):
    """A step that began at `began` and was found to be late. `waits`: how long each thread had waited for a core."""

    began: float
    waits: dict[int, float]


class Enforcer:
    """`predicted_s()`: the longest that a rollout step takes, as far as known. `granting()`: whether there is a budget.
    `send(processes, signal)` is `processes.send`, and returns how many processes got the signal. `waits(processes)`:
    seconds that each of their threads has waited for a core."""

    def __init__(
        self,
        borrowers: BorrowerTable,
        *,
        yield_s: float,
        kill_s: float,
        most: int,
        predicted_s: Callable[[], float],
        granting: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        send: Callable[[Iterable[BorrowerProcess], signal.Signals], int] = borrower_processes.send,
        waits: Callable[[Iterable[BorrowerProcess]], dict[int, float]] = borrower_processes.core_waits,
    ) -> None:
        self._borrowers, self._clock, self._send, self._waits = borrowers, clock, send, waits
        self._yield_s, self._kill_s, self._most = yield_s, kill_s, most
        self._predicted_s, self._granting = predicted_s, granting
        self._calm_since: float | None = None
        self._late: dict[str, LateStep] = {}  # by worker

    async def run(self) -> None:
        """Check all engines, forever."""
        while True:
            suspect = self.check()
            await asyncio.sleep(_SUSPECT_S if suspect else _LOOK_S)

    def check(self) -> bool:
        """Check once. Returns whether an engine still steps without a budget, and may have to be stopped."""
        now = self._clock()
        self._calm_since = (self._calm_since or now) if self._granting() else None
        suspects = [self._check(loan, now) for loan in self._borrowers.all()]
        suspects += [self._check_parting(loan, now) for loan in list(self._borrowers.parting)]
        return any(suspects)

    def close(self) -> None:
        """Continue stopped engines: without a lender nothing else would."""
        for loan in self._borrowers.all():
            if loan.stopped_at is not None:
                self._continue(loan, self._clock())

    def _check(self, loan: Loan, now: float) -> bool:
        if loan.stopped_at is not None:
            if now - loan.stopped_at > self._kill_s and self._calm_since is None:
                self._kill(loan, "there was no budget to continue it")
            elif self._calm_since is not None and now - self._calm_since >= _CALM_S:
                self._continue(loan, now)
            return False
        why = self._violation(loan, now)
        if why:
            strikes = loan.account.recent_strikes(now)
            if strikes >= self._most:
                self._kill(loan, f"{why}, and it was stopped {strikes} times lately")
            else:
                self._stop(loan, now, why)
        return loan.taken_at is not None and loan.stepping_since() is not None

    def _check_parting(self, loan: Loan, now: float) -> bool:
        """An engine whose stream ended may finish its step, and no more."""
        if loan.stopped_at is not None:
            self._kill(loan, "its stream ended while it was stopped")
        elif why := self._violation(loan, now):
            self._kill(loan, f"{why}, and its stream has ended")
        elif loan.gone_at is None or now - loan.gone_at > _PARTING_S + self._yield_s:
            self._late.pop(loan.worker_id, None)
            self._borrowers.forget(loan)
            return False
        return loan.stepping_since() is not None

    def _violation(self, loan: Loan, now: float) -> str:
        """Why the engine has to be stopped; empty: it does not have to."""
        if loan.taken_at is None or not any(borrower_processes.alive(process) for process in loan.processes):
            return ""
        steps = loan.page.steps()
        begun = steps.steps - loan.steps_when_taken
        if begun > _ACCIDENTS:
            return f"it began {begun} steps without a budget"
        late_s = now - loan.taken_at - self._predicted_s()
        if not steps.stepping or late_s <= 0.0:
            self._late.pop(loan.worker_id, None)
            return ""
        late_s -= self._waited_s(loan, steps.began)
        if late_s > self._yield_s and steps.began <= now - self._yield_s:
            return f"its step is {late_s:.3f} s longer than predicted"
        return ""

    def _waited_s(self, loan: Loan, began: float) -> float:
        """How long the engine has waited for a core since its step was found late: the thread that waited longest. At
        most `kill_s`, because threads also wait for others of their engine.
        """
        waits, late = self._waits(loan.processes), self._late.get(loan.worker_id)
        if late is None or late.began != began:
            self._late[loan.worker_id] = late = LateStep(began, waits)
        longest = max((waited - late.waits.get(thread, 0.0) for thread, waited in waits.items()), default=0.0)
        return min(longest, self._kill_s)

    def _stop(self, loan: Loan, now: float, why: str) -> None:
        sent = self._send(loan.processes, signal.SIGSTOP)
        loan.stop(now)
        self._note("stopped", loan, why, sent)
        self._borrowers.changed()

    def _continue(self, loan: Loan, now: float) -> None:
        loan.resume(now)
        self._borrowers.changed()  # the budget comes first, because the engine goes on in the middle of a step
        self._note("continued", loan, "there is a budget", self._send(loan.processes, signal.SIGCONT))

    def _kill(self, loan: Loan, why: str) -> None:
        self._late.pop(loan.worker_id, None)
        self._note("killed", loan, why, self._send(loan.processes, signal.SIGKILL))
        self._borrowers.leave(loan, "it had to be killed", watched=False)
        self._borrowers.forget(loan)

    def _note(self, what: str, loan: Loan, why: str, sent: int) -> None:
        metrics.ENFORCED.labels(what).inc()
        write = log.info if what == "continued" else log.warning
        write(f"worker {what}", worker_id=loan.worker_id, reason=why, processes=sent, stops=loan.account.stops)
