"""Declares the serving-guard's metrics of borrowers, whoever owns the device."""

from typing import Final

from ebbtide import telemetry
from ebbtide.loans.loan_meters import RECLAIMS, LoanMeters

BORROWERS = telemetry.gauge("guard_borrowers", "workers that borrow")
HARVESTED = telemetry.counter("guard_harvested_tokens_total", "tokens that rollouts made here")
GPU_SECONDS = telemetry.counter("guard_harvested_seconds_total", "seconds in which rollout steps ran")
RECLAIM_SECONDS = telemetry.histogram(
    "guard_reclaim_seconds", "the owner needs its device, to the end of the rollout step under way", buckets=RECLAIMS
)
ENFORCED = telemetry.counter("guard_enforced_total", "workers stopped, continued or killed", ("kind",))
LOAN_METERS: Final = LoanMeters(
    borrowers=BORROWERS,
    harvested=HARVESTED,
    gpu_seconds=GPU_SECONDS,
    reclaim_seconds=RECLAIM_SECONDS,
    enforced=ENFORCED,
)
