"""Hand-back cannot be vetoed: an engine that goes on when its budget was taken back is made to stand still.

Invariant: an engine without a budget runs no longer than its predicted step and `yield_s`; then its processes, and all
below them, are stopped (SIGSTOP). One that was stopped is continued when there is a budget again, for it finishes its
step first; it is killed (SIGKILL) if there is none for `kill_s`, if it was stopped `most` times lately, or if it lost
its stream meanwhile. Its rollouts go elsewhere: the coordinator hears no more tokens, or that its worker has gone.
"""

import asyncio
import signal
import time
from collections.abc import Callable, Iterable
from typing import Final

from ebbtide import telemetry
from ebbtide.serving_guard import metrics
from ebbtide.serving_guard.loans import borrower_processes
from ebbtide.serving_guard.loans.borrower_processes import BorrowerProcess
from ebbtide.serving_guard.loans.borrower_table import BorrowerTable
from ebbtide.serving_guard.loans.loan import Loan

log = telemetry.get_logger(__name__)

#: How often engines are looked at: while one is to stand still and does not, and otherwise.
_SUSPECT_S: Final = 0.01
_LOOK_S: Final = 0.05
#: A stopped engine is continued when there was a budget for so long: its step under way fits into idle time then.
_CALM_S: Final = 0.1
#: A step that had begun is one; that one more began without a budget is no accident any more.
_ACCIDENTS: Final = 1
#: A stop that is so long ago is forgiven.
_FORGIVEN_S: Final = 600.0
#: How long one whose stream ended is watched for steps behind it.
_PARTING_S: Final = 2.0


class Enforcer:
    """`predicted_s()`: how long a rollout step takes at most, as far as known. `granting()`: whether there is a budget.
    `send(processes, signal)` is `processes.send`, and returns how many got it."""

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
    ) -> None:
        self._borrowers, self._clock, self._send = borrowers, clock, send
        self._yield_s, self._kill_s, self._most = yield_s, kill_s, most
        self._predicted_s, self._granting = predicted_s, granting
        self._calm_since: float | None = None

    async def run(self) -> None:
        """Look at all engines, for ever."""
        while True:
            suspect = self.check()
            await asyncio.sleep(_SUSPECT_S if suspect else _LOOK_S)

    def check(self) -> bool:
        """Look once. Whether one goes on that should not, and may have to be stopped."""
        now = self._clock()
        self._calm_since = (self._calm_since or now) if self._granting() else None
        suspects = [self._check(loan, now) for loan in self._borrowers.all()]
        suspects += [self._check_parting(loan, now) for loan in list(self._borrowers.parting)]
        return any(suspects)

    def close(self) -> None:
        """The guard leaves: nobody would continue whom it stopped."""
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
            account = loan.account
            account.strikes = [at for at in account.strikes if now - at < _FORGIVEN_S]
            if len(account.strikes) >= self._most:
                self._kill(loan, f"{why}, and it was stopped {len(account.strikes)} times lately")
            else:
                account.strikes.append(now)
                self._stop(loan, now, why)
        return loan.taken_at is not None and loan.stepping_since() is not None

    def _check_parting(self, loan: Loan, now: float) -> bool:
        """One whose stream ended may finish its step, and no more."""
        if loan.stopped_at is not None:
            self._kill(loan, "it lost its stream while it was stopped")
        elif why := self._violation(loan, now):
            self._kill(loan, f"{why}, and its stream has ended")
        elif loan.gone_at is None or now - loan.gone_at > _PARTING_S + self._yield_s:
            self._borrowers.parting.remove(loan)
            return False
        return loan.stepping_since() is not None

    def _violation(self, loan: Loan, now: float) -> str:
        """Why its engine has to be stopped; empty: it need not."""
        if loan.taken_at is None or not any(borrower_processes.alive(process) for process in loan.processes):
            return ""
        steps = loan.page.steps()
        begun = steps.steps - loan.steps_when_taken
        if begun > _ACCIDENTS:
            return f"it began {begun} steps without a budget"
        late_s = now - loan.taken_at - self._predicted_s()
        if steps.stepping and late_s > self._yield_s and steps.began <= now - self._yield_s:
            return f"its step goes on {late_s:.3f} s beyond the time predicted"
        return ""

    def _stop(self, loan: Loan, now: float, why: str) -> None:
        sent = self._send(loan.processes, signal.SIGSTOP)
        loan.stopped_at = now
        loan.account.stops += 1
        loan.settle_stopped(now)
        self._say("stopped", loan, why, sent)
        self._borrowers.changed()

    def _continue(self, loan: Loan, now: float) -> None:
        loan.stopped_at = None
        loan.heard_at = now
        loan.forgive()
        self._borrowers.changed()  # its budget first: it goes on in the midst of a step
        self._say("continued", loan, "there is a budget", self._send(loan.processes, signal.SIGCONT))

    def _kill(self, loan: Loan, why: str) -> None:
        sent = self._send(loan.processes, signal.SIGKILL)
        loan.stopped_at = None
        self._say("killed", loan, why, sent)
        self._borrowers.leave(loan, "it had to be killed", watched=False)
        if loan in self._borrowers.parting:
            self._borrowers.parting.remove(loan)

    def _say(self, what: str, loan: Loan, why: str, sent: int) -> None:
        metrics.ENFORCED.labels(what).inc()
        say = log.info if what == "continued" else log.warning
        say(f"worker {what}", worker_id=loan.worker_id, reason=why, processes=sent, stops=loan.account.stops)
