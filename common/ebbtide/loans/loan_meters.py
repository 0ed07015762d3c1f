"""Names the metrics of borrowers, which each lending program declares as its own."""

from typing import Final

from msgspec import Struct
from prometheus_client import Counter, Gauge, Histogram

#: Bounds of `reclaim_seconds`: a step takes milliseconds.
RECLAIMS: Final = (0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0)


class LoanMeters(Struct, frozen=True, kw_only=True):
    borrowers: Gauge
    harvested: Counter  # tokens
    gpu_seconds: Counter  # in which steps ran
    reclaim_seconds: Histogram  # from a reclaim to the end of the step under way
    enforced: Counter  # workers stopped, continued or killed, by `kind`
