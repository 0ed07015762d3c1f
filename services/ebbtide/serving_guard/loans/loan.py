"""One borrower, from its Hello until it is gone: its page, and what its engine did.

Invariant: `budget` is what stands in the page; `taken_at` is when that last became nothing, None while there is some.
All of it ends with the stream; sums that outlive a stream are in `LoanAccount`.
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import Final

from msgspec import Struct, field

from ebbtide.grants import Page, Stepping
from ebbtide.serving_guard import metrics
from ebbtide.serving_guard.loans.borrower_processes import BorrowerProcess
from ebbtide.types.grants import BorrowerReport, Budget, Hello, Residency

#: A worker reports every 0.1 s. One that is silent for so long is frozen, and nothing is kept for it.
SILENT_S: Final = 1.0
#: A budget that differs only in its end is written again when the end moves by so much, or the old one is as near.
_RENEW_S: Final = 0.02
#: Steps told of one look, at most: after a standstill of this process there may be more.
_STEPS: Final = 64
#: Reclaims that the percentiles in the status rest on.
_RECLAIMS: Final = 2000


class LoanAccount(Struct):
    """What a worker harvested since the guard first met it, over all its streams."""

    tokens: int = 0
    gpu_s: float = 0.0
    recomputed: int = 0
    reclaims: int = 0
    stops: int = 0
    strikes: list[float] = []  # when it was stopped, lately
    pids: tuple[BorrowerProcess, ...] = ()
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=_RECLAIMS))


class Loan:
    """`now` is in seconds of the monotonic clock."""

    def __init__(
        self, hello: Hello, processes: tuple[BorrowerProcess, ...], page: Page, account: LoanAccount, now: float
    ) -> None:
        self.hello, self.processes, self.page, self.account = hello, processes, page, account
        self.report: BorrowerReport | None = None
        self.reported = asyncio.Event()
        self.heard_at = now
        self.budget, self.idle = Budget(), False
        self.taken_at: float | None = now
        self.steps_when_taken = 0
        self.stopped_at: float | None = None
        self.gone_at: float | None = None
        self.tokens_per_s = 0.0
        self._arrivals: list[tuple[float, int]] = []  # of requests that met a step; the steps that had ended by then
        self._seen = page.steps()
        self._told: tuple[float, int] = (now, 0)
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
        """How long its engine would take to wake, as measured; 0: it is awake, or nobody knows yet."""
        if self.report is None or self.report.residency is Residency.AWAKE:
            return 0.0
        return self.report.wake_host_s if self.report.residency is Residency.HOST else self.report.wake_away_s

    def write(self, budget: Budget, now: float, *, idle: bool = False) -> None:
        """Let the next step take this; what its engine cannot take anyway is left out. `idle`: nothing is inside the
        serving engine."""
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
            self._settle(self.page.steps())  # before the next step's times stand there
        self.page.write_budget(budget, idle=idle)
        self.budget, self.idle = budget, idle
        if budget.tokens:
            self.taken_at = None
        elif self.taken_at is None:
            self.taken_at = now
            self.steps_when_taken = self.page.steps().steps

    def stepping_since(self) -> float | None:
        """When the step under way began, if one is."""
        if self.stopped_at is not None:
            return None
        steps = self.page.steps()
        return steps.began if steps.stepping else None

    def reclaimed(self, arrived: float) -> None:
        """A request took its budget away; if it met a step, `new_steps` finds out how long that went on."""
        self.account.reclaims += 1
        steps = self.page.steps()
        if steps.stepping:
            self._arrivals.append((arrived, steps.steps))

    @property
    def yielding(self) -> bool:
        """Whether the end of a reclaim is still to be seen."""
        return bool(self._arrivals)

    def new_steps(self) -> Iterator[tuple[float, int, float]]:
        """Steps since the last call: when they ended at the latest, and the mean of their tokens and seconds."""
        steps, seen = self.page.steps(), self._seen
        if steps.pid != seen.pid or steps.steps < seen.steps:
            seen = self._seen = steps  # another engine
            self.steps_when_taken = min(self.steps_when_taken, steps.steps)
        self._settle(steps)
        if count := steps.steps - seen.steps:
            self._seen = steps
            busy = max(0.0, steps.busy_s - seen.busy_s)
            self.account.gpu_s += busy
            metrics.GPU_SECONDS.inc(busy)
            tokens = (steps.scheduled - seen.scheduled) // count
            yield from [(steps.ended, tokens, busy / count)] * (min(count, _STEPS) if tokens > 0 else 0)

    def heard(self, report: BorrowerReport, now: float) -> None:
        old = self.report or report  # what it made before this guard met it is not this guard's
        made = report.tokens_generated - old.tokens_generated
        made = report.tokens_generated if made < 0 else made
        again = max(0, report.recomputed_tokens - old.recomputed_tokens)
        self.account.tokens += made
        self.account.recomputed += again
        metrics.HARVESTED.inc(made)
        self.report, self.heard_at = report, now
        self.reported.set()
        since, tokens = self._told
        if now - since >= 1.0:
            self.tokens_per_s = (self.account.tokens - tokens) / (now - since)
            self._told = (now, self.account.tokens)

    def forgive(self) -> None:
        """Whatever it did until now, it begins anew: a budget is there, or taken just now."""
        self.steps_when_taken = self.page.steps().steps
        if self.taken_at is not None:
            self.taken_at = self.heard_at

    def settle_stopped(self, now: float) -> None:
        """Its engine was made to stand still: here its reclaims end."""
        for arrived, _ in self._arrivals:
            self._record(now - arrived)
        self._arrivals.clear()

    def _settle(self, steps: Stepping) -> None:
        if not self._arrivals:
            return
        left = []
        for arrived, ended in self._arrivals:
            if steps.stepping and steps.steps <= ended:
                left.append((arrived, ended))
            else:
                self._record(max(0.0, steps.ended - arrived))
        self._arrivals = left

    def _record(self, seconds: float) -> None:
        self.account.latencies.append(seconds)
        metrics.RECLAIM_SECONDS.observe(seconds)
