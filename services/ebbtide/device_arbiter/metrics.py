"""Declares the device-arbiter's metrics."""

from ebbtide import telemetry
from ebbtide.loans.loan_meters import RECLAIMS, LoanMeters

_RETURNS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)

HELD = telemetry.gauge("arbiter_held", "1 while the trainer has its device")
SECONDS = telemetry.counter("arbiter_seconds_total", "seconds by who may use the device", ("state",))
TAKE_BACKS = telemetry.counter("arbiter_take_backs_total", "times that the trainer took its device back")
COMPUTE_SECONDS = telemetry.histogram(
    "arbiter_compute_seconds", "a take-back until no engine steps any more", buckets=_RETURNS
)
MEMORY_SECONDS = telemetry.histogram(
    "arbiter_memory_seconds", "a take-back until engines have given up memory", buckets=_RETURNS
)
REFUSED = telemetry.counter("arbiter_refused_total", "trainers that were refused the device", ("reason",))
BORROWERS = telemetry.gauge("arbiter_borrowers", "workers that borrow")
HARVESTED = telemetry.counter("arbiter_harvested_tokens_total", "tokens that rollouts made here")
GPU_SECONDS = telemetry.counter("arbiter_harvested_seconds_total", "seconds in which rollout steps ran")
RECLAIM_SECONDS = telemetry.histogram(
    "arbiter_reclaim_seconds", "a take-back to the end of the rollout step under way", buckets=RECLAIMS
)
ENFORCED = telemetry.counter("arbiter_enforced_total", "workers stopped, continued or killed", ("kind",))
LOANS = LoanMeters(
    borrowers=BORROWERS,
    harvested=HARVESTED,
    gpu_seconds=GPU_SECONDS,
    reclaim_seconds=RECLAIM_SECONDS,
    enforced=ENFORCED,
)
