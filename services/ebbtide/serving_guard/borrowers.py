"""Keeps the workers that borrow a device, by their ids: the loan of each, its budget, and what its engine did.

Invariant: each id has one loan, that of its newest stream; an older loan of the same id ends at once. A loan whose
stream ended has no budget, and is watched (`parting`) until its engine stands still. Nothing outlives the process:
workers connect again and send Hello, and until then their grants have run out.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, Protocol

from msgspec import Struct, field

from ebbtide import telemetry
from ebbtide.errors import NotReady
from ebbtide.grants import Page, Stepping, page_path
from ebbtide.serving_guard import borrower_processes
from ebbtide.serving_guard.borrower_processes import BorrowerProcess, stopped
from ebbtide.types.grants import GRANTS_VERSION, Borrower, BorrowerReport, Budget, Hello, Residency
from ebbtide.types.ids import check_id

log = telemetry.get_logger(__name__)

_RECLAIM_BUCKETS = (0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0)

BORROWERS = telemetry.gauge("guard_borrowers", "workers that borrow")
HARVESTED = telemetry.counter("guard_harvested_tokens_total", "tokens that rollouts generated here")
GPU_SECONDS = telemetry.counter("guard_harvested_seconds_total", "seconds in which rollout steps ran")
RECLAIM_SECONDS = telemetry.histogram(
    "guard_reclaim_seconds",
    "a request's arrival, or a trainer's take-back, to the end of the rollout step in progress",
    buckets=_RECLAIM_BUCKETS,
)
ENFORCED = telemetry.counter(
    "guard_enforced_total", "workers that the guard had to stop, continue or kill (`kind`)", ("kind",)
)

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
    """One borrower, from its Hello until it is gone. `now` is in seconds of the monotonic clock.

    Invariant: `budget` is what the page holds; `taken_at` is when that last became empty, None while there is a budget.
    All of it ends with the stream. Sums that outlive a stream are in `LoanAccount`.
    """

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
        if hello.slots:  # else the page holds what a worker writes for the warm-up of an engine that boots
            self.page.write_budget(Budget())
        self.steps_when_taken = self._seen.steps

    @property
    def worker_id(self) -> str:
        return self.hello.worker_id

    def granted(self, now: float) -> bool:
        """Whether it may have a budget at all."""
        fit = self.stopped_at is None and self.gone_at is None and now - self.heard_at <= SILENT_S
        return fit and self.hello.slots > 0 and (self.report is None or self.report.residency is Residency.AWAKE)

    @property
    def boots(self) -> bool:
        """Whether its engine is not there yet, and on its way: steps until its first Hello with slots are its own."""
        report = self.report
        return not self.hello.slots and report is not None and report.moving and report.residency is Residency.AWAY

    @property
    def waits(self) -> bool:
        """Whether its engine is not there yet, and not on its way: what the page says was another engine's."""
        return not self.hello.slots and not self.boots

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
        """Allow the next step this budget, cut to what the engine can take; none to one that is not there yet. `idle`:
        the owner leaves the device idle."""
        if not self.hello.slots:
            return
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
        if self.stopped_at is not None or self.waits:
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
            GPU_SECONDS.inc(busy)
            tokens = (steps.scheduled - seen.scheduled) // count
            yield from [(steps.ended, tokens, busy / count)] * (min(count, _STEPS) if tokens > 0 else 0)

    def record_report(self, report: BorrowerReport, now: float) -> None:
        old = self.report or report  # tokens made before the first report belong to another lender
        made = report.tokens_generated - old.tokens_generated
        made = report.tokens_generated if made < 0 else made
        again = max(0, report.recomputed_tokens - old.recomputed_tokens)
        self.account.tokens += made
        self.account.recomputed += again
        HARVESTED.inc(made)
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
        RECLAIM_SECONDS.observe(seconds)


#: Accounts kept of workers that have borrowed.
_ACCOUNTS: Final = 64
#: Beside one engine there is one worker, or a few.
_MOST: Final = 16


#: The phase of a borrower while its device or host cannot be read: nothing is granted to it.
UNREADABLE: Final = "unreadable"


class AllowedMemory(Struct, frozen=True):
    """The memory in one borrower's grant."""

    kv_bytes: int
    phase: str  # one of the lender's, or `UNREADABLE`
    residency: Residency


class BorrowerMemory(Protocol):
    """Divides memory between the owner and the borrowers. `now` is in seconds of the monotonic clock."""

    def joined(self, worker_id: str, hello: Hello) -> None:
        """Add a borrower, or replace it. Raises `InvalidRequest` if its device cannot be read."""
        ...

    def left(self, worker_id: str) -> None: ...

    def reported(self, now: float, worker_id: str, report: BorrowerReport) -> None: ...


class BorrowerTable:
    """Adds and ends loans, and tells `memory` and the subscribers of each change."""

    def __init__(self, folder: Path, memory: BorrowerMemory, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._memory, self._clock = folder, memory, clock
        self._loans: dict[str, Loan] = {}
        self._accounts: dict[str, LoanAccount] = {}
        self._subscribers: list[Callable[[], None]] = []
        self.parting: list[Loan] = []
        self.news = asyncio.Event()  # set when grants must be sent before their time
        self.open = True

    def all(self) -> list[Loan]:
        return list(self._loans.values())

    def subscribe(self, call: Callable[[], None]) -> None:
        """Call this after each change of a loan that may change how budgets are shared."""
        self._subscribers.append(call)

    def changed(self) -> None:
        for call in self._subscribers:
            call()

    def join(self, hello: Hello) -> Loan:
        """Begin the loan of a worker that sent Hello. Raises `InvalidRequest` or `NotReady` if it cannot borrow
        here."""
        if hello.protocol_version != GRANTS_VERSION:
            raise NotReady(f"this lender speaks version {GRANTS_VERSION} of the grants, not {hello.protocol_version}")
        check_id(hello.worker_id, field="hello.worker_id")
        old = self._loans.get(hello.worker_id)
        if old is None and len(self._loans) >= _MOST:
            raise NotReady(f"{_MOST} workers borrow here already")
        path = page_path(self._folder, hello.worker_id)
        page = Page(path)
        found = borrower_processes.checked(hello.pids, path)
        self._memory.joined(hello.worker_id, hello)
        loan = Loan(hello, found, page, self._account(hello.worker_id, found), self._clock())
        self._loans[hello.worker_id] = loan
        self.parting = [one for one in self.parting if one.worker_id != hello.worker_id]
        if old is not None:
            self.leave(old, "it connected again", watched=False)
        BORROWERS.set(len(self._loans))
        log.info("borrows", worker_id=hello.worker_id, pids=hello.pids, step_tokens=hello.step_tokens)
        self.changed()
        return loan

    def leave(self, loan: Loan, reason: str, *, watched: bool = True) -> None:
        """End a loan, as its stream ended or a newer one replaced it. A second call does nothing."""
        if loan.gone_at is not None:
            return
        loan.end(self._clock())
        if self._loans.get(loan.worker_id) is loan:
            del self._loans[loan.worker_id]
            self._memory.left(loan.worker_id)
        if watched:
            self.parting.append(loan)
        BORROWERS.set(len(self._loans))
        log.info("borrows no more", worker_id=loan.worker_id, reason=reason)
        self.news.set()
        self.changed()

    def forget(self, loan: Loan) -> None:
        """Watch a loan that has ended no longer."""
        if loan in self.parting:
            self.parting.remove(loan)

    def record_report(self, loan: Loan, report: BorrowerReport) -> None:
        if loan.gone_at is not None:
            return
        now = self._clock()
        before = (loan.granted(now), loan.wanted)
        loan.record_report(report, now)
        self._memory.reported(now, loan.worker_id, report)
        if before != (loan.granted(now), loan.wanted):
            self.changed()

    def close(self) -> None:
        """Take everything back: no step begins from now on."""
        self.open = False
        now = self._clock()
        for loan in self._loans.values():
            loan.write(Budget(), now)
        self.news.set()

    def _account(self, worker_id: str, found: tuple[borrower_processes.BorrowerProcess, ...]) -> LoanAccount:
        account = self._accounts.pop(worker_id, None) or LoanAccount()
        account.attach(found)
        self._accounts[worker_id] = account
        while len(self._accounts) > _ACCOUNTS:
            self._accounts.pop(next(iter(self._accounts)))
        return account


def borrower_status(loan: Loan, allowed: AllowedMemory, now: float) -> Borrower:
    """The borrower at `now`, in seconds of the monotonic clock. `allowed`: the memory that it may use."""
    account, report = loan.account, loan.report or BorrowerReport()
    p50, _, p99 = percentiles(account.latencies)
    return Borrower(
        worker_id=loan.worker_id,
        state=_state(loan, now),
        running=report.running,
        tokens_per_s=loan.tokens_per_s,
        tokens_harvested=account.tokens,
        gpu_seconds=account.gpu_s,
        kv_bytes=allowed.kv_bytes,
        kv_bytes_used=report.kv_bytes_used,
        memory=allowed.phase,
        residency=report.residency,
        reclaims=account.reclaims,
        reclaim_p50_s=p50,
        reclaim_p99_s=p99,
        stops=account.stops,
        recomputed_tokens=account.recomputed,
    )


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The 50th, 95th and 99th percentile, each a value that occurred; zeros without values."""
    ordered = sorted(values) or [0.0]
    p50, p95, p99 = (ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.95, 0.99))
    return p50, p95, p99


def _state(loan: Loan, now: float) -> str:
    if loan.stopped_at is not None:
        return "stopped"
    if not loan.granted(now):
        return "away"
    return "granted" if loan.budget.tokens else "standing"
