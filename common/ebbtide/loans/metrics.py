"""Declares the lender's metrics of borrowers, whoever owns the device."""

from ebbtide import telemetry

_RECLAIMS = (0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0)

BORROWERS = telemetry.gauge("guard_borrowers", "workers that borrow")
HARVESTED = telemetry.counter("guard_harvested_tokens_total", "tokens that rollouts made here")
GPU_SECONDS = telemetry.counter("guard_harvested_seconds_total", "seconds in which rollout steps ran")
RECLAIM_SECONDS = telemetry.histogram(
    "guard_reclaim_seconds", "the owner needs its device, to the end of the rollout step under way", buckets=_RECLAIMS
)
ENFORCED = telemetry.counter("guard_enforced_total", "workers stopped, continued or killed", ("kind",))
