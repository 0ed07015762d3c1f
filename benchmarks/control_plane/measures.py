"""CPU seconds of processes, and percentiles."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used, user and system, to a hundredth."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def percentile(values: Sequence[float], share: float) -> float:
    """By nearest rank: the smallest value that at least `share` of `values` do not exceed, so that p99 of a hundred or
    fewer is the largest. Not a number without values.
    """
    if not values:
        return float("nan")
    return sorted(values)[min(len(values), max(1, math.ceil(share * len(values)))) - 1]


def spread(values: Sequence[float], unit: str, scale: float = 1.0) -> dict[str, float]:
    """`p50_UNIT`, `p99_UNIT`, `max_UNIT` and the number of values."""
    return {
        f"p50_{unit}": round(percentile(values, 0.5) * scale, 3),
        f"p99_{unit}": round(percentile(values, 0.99) * scale, 3),
        f"max_{unit}": round(max(values, default=float("nan")) * scale, 3),
        "count": len(values),
    }
