"""Reports one borrower, for the status of its lender."""

from collections.abc import Sequence

from ebbtide.loans.grant_issuer import AllowedMemory
from ebbtide.loans.loan import Loan
from ebbtide.types.grants import Borrower, BorrowerReport


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
