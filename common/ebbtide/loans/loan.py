"""Keeps the state of one borrower's stream: its page, its budget and what its engine did.

Invariant: `budget` is what the page holds; `taken_at` is when that last became empty, None while there is a budget.
All of it ends with the stream. Sums that outlive a stream are in `LoanAccount`.
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import Final

from msgspec import Struct, field

from ebbtide.grants import Page, Stepping
from ebbtide.loans import metrics
from ebbtide.loans.borrower_processes import BorrowerProcess, stopped
from ebbtide.types.grants import BorrowerReport, Budget, Hello, Residency

#: A worker reports every 0.1 s. A worker that is silent for this long is frozen, and no budget is kept for it.
SILENT_S: Final = 1.0
#: A budget that differs only in its end is written again when the end moves by this much, or the old end is this near.
_RENEW_S: Final = 0.02
#: Steps reported from one look at the page, at most: after a standstill of this process there may be more.
_STEPS: Final = 64
#: Reclaims that the percentiles in the status rest on.
_RECLAIMS: Final = 2000
#: A stop that is older than this no longer counts as a strike.
_FORGIVEN_S: Final = 600.0


class LoanAccount(Struct):
    """What a worker harvested since its lender first met it, over all its streams."""

    tokens: int = 0
    gpu_s: float = 0.0
    recomputed: int = 0
    reclaims: int = 0
    stops: int = 0
    strikes: list[float] = []  # when these processes were stopped lately
    pids: tuple[BorrowerProcess, ...] = ()
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=_RECLAIMS))

    def attach(self, pids: tuple[BorrowerProcess, ...]) -> None:
        """Strikes count against the same processes only."""
        if self.pids != pids:
            self.pids, self.strikes = pids, []

    def recent_strikes(self, now: float) -> int:
        self.strikes = [at for at in self.strikes if now - at < _FORGIVEN_S]
        return len(self.strikes)


class Loan:
    """One borrower, from its Hello until it is gone. `now` is in seconds of the monotonic clock."""

    def __init__(
        self, hello: Hello, processes: tuple[BorrowerProcess, ...], page: Page, account: LoanAccount, now: float
    ) -> None:
        self.hello, self.processes, self.page, self.account = hello, processes, page, account
        self.report: BorrowerReport | None = None
        self.reported = asyncio.Event()
        self.issued = 0  # sequence of the newest grant
        self.heard_at = now
        self.budget, self.idle = Budget(), False
        self.taken_at: float | None = now
        # It may have been stopped by an earlier lender, or before it connected again.
        self.stopped_at: float | None = now if any(map(stopped, processes)) else None
        self.gone_at: float | None = None
        self.tokens_per_s = 0.0
        self._arrivals: list[tuple[float, int]] = []  # of requests that met a step; the steps that had ended by then
        self._seen = page.steps()
        self._rate_from: tuple[float, int] = (now, 0)  # when `tokens_per_s` was last computed, and the tokens by then
        self.page.write_budget(Budget())
        self.steps_when_taken = self._seen.steps

    @property
    def worker_id(self) -> str:
        return self.hello.worker_id

    def granted(self, now: float) -> bool:
        """Whether it may have a budget at all."""
        fit = self.stopped_at is None and self.gone_at is None and now - self.heard_at <= SILENT_S
        return fit and (self.report is None or self.report.residency is Residency.AWAKE)

    @property
    def wanted(self) -> bool:
        return self.report is None or self.report.wanted

    @property
    def wake_s(self) -> float:
        """How long its engine takes to wake, as measured; 0: it is awake, or the time is unknown."""
        if self.report is None or self.report.residency is Residency.AWAKE:
            return 0.0
        return self.report.wake_host_s if self.report.residency is Residency.HOST else self.report.wake_away_s

    def write(self, budget: Budget, now: float, *, idle: bool = False) -> None:
        """Allow the next step this budget, cut to what the engine can take. `idle`: the owner leaves
        the device idle."""
        if budget.tokens and budget.sequences:
            tokens = min(budget.tokens, self.hello.step_tokens or budget.tokens)
            budget = Budget(tokens, min(budget.sequences, self.hello.slots or budget.sequences), budget.until)
        else:
            budget, idle = Budget(), False
        old = self.budget
        if (budget.tokens, budget.sequences, idle) == (old.tokens, old.sequences, self.idle) and (
            not budget.tokens or (0 <= budget.until - old.until < _RENEW_S and old.until - now > _RENEW_S)
        ):
            return
        if budget.tokens and self._arrivals:
            self._finish_reclaims(self.page.steps())  # before the next step overwrites the times in the page
        self.page.write_budget(budget, idle=idle)
        self.budget, self.idle = budget, idle
        if budget.tokens:
            self.taken_at = None
        elif self.taken_at is None:
            self.taken_at = now
            self.steps_when_taken = self.page.steps().steps

    def stepping_since(self) -> float | None:
        """When the step under way began; None: no step is under way."""
        if self.stopped_at is not None:
            return None
        steps = self.page.steps()
        return steps.began if steps.stepping else None

    def reclaimed(self, arrived: float) -> None:
        """Count a reclaim by a request. If the request met a step, `new_steps` measures how long that step went on."""
        self.account.reclaims += 1
        steps = self.page.steps()
        if steps.stepping:
            self._arrivals.append((arrived, steps.steps))

    @property
    def yielding(self) -> bool:
        """Whether a reclaim still waits for the end of a step."""
        return bool(self._arrivals)

    def new_steps(self) -> Iterator[tuple[float, int, float]]:
        """Steps since the last call: the latest end, and the mean of their tokens and of their seconds."""
        steps, seen = self.page.steps(), self._seen
        if steps.pid != seen.pid or steps.steps < seen.steps:
            seen = self._seen = steps  # another engine
            self.steps_when_taken = min(self.steps_when_taken, steps.steps)
        self._finish_reclaims(steps)
        if count := steps.steps - seen.steps:
            self._seen = steps
            busy = max(0.0, steps.busy_s - seen.busy_s)
            self.account.gpu_s += busy
            metrics.GPU_SECONDS.inc(busy)
            tokens = (steps.scheduled - seen.scheduled) // count
            yield from [(steps.ended, tokens, busy / count)] * (min(count, _STEPS) if tokens > 0 else 0)

    def record_report(self, report: BorrowerReport, now: float) -> None:
        old = self.report or report  # tokens made before the first report belong to another lender
        made = report.tokens_generated - old.tokens_generated
        made = report.tokens_generated if made < 0 else made
        again = max(0, report.recomputed_tokens - old.recomputed_tokens)
        self.account.tokens += made
        self.account.recomputed += again
        metrics.HARVESTED.inc(made)
        self.report, self.heard_at = report, now
        self.reported.set()
        since, tokens = self._rate_from
        if now - since >= 1.0:
            self.tokens_per_s = (self.account.tokens - tokens) / (now - since)
            self._rate_from = (now, self.account.tokens)

    def stop(self, now: float) -> None:
        """Record that its processes were stopped. Its pending reclaims end here."""
        self.stopped_at = now
        self.account.stops += 1
        self.account.strikes.append(now)
        for arrived, _ in self._arrivals:
            self._record_reclaim(now - arrived)
        self._arrivals.clear()

    def resume(self, now: float) -> None:
        """Record that its processes go on. Earlier steps no longer count against it."""
        self.stopped_at, self.heard_at = None, now
        self.steps_when_taken = self.page.steps().steps
        if self.taken_at is not None:
            self.taken_at = now

    def end(self, now: float) -> None:
        """Take its budget for good: its stream is over."""
        self.write(Budget(), now)
        self.gone_at = now

    def _finish_reclaims(self, steps: Stepping) -> None:
        """Record the reclaims whose step has ended."""
        if not self._arrivals:
            return
        left = []
        for arrived, ended in self._arrivals:
            if steps.stepping and steps.steps <= ended:
                left.append((arrived, ended))
            else:
                self._record_reclaim(max(0.0, steps.ended - arrived))
        self._arrivals = left

    def _record_reclaim(self, seconds: float) -> None:
        self.account.latencies.append(seconds)
        metrics.RECLAIM_SECONDS.observe(seconds)
