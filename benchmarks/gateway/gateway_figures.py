"""Names the figures of the gateway's benchmark, what is promised of each, and why one is missing."""

from collections.abc import Mapping
from typing import Any, Final

#: By name: the bound, and whether a figure must be at most (or at least) that.
PROMISED_BOUNDS: Final[dict[str, tuple[str, float]]] = {
    "client_errors_under_kills": ("<=", 0),
    "trace_mismatches": ("<=", 0),
    "ttft_overhead_p50_ms": ("<=", 30),
    "ttft_overhead_p99_ms": ("<=", 80),
    "tpot_over_vllm": ("<=", 1.05),
    "gateway_cpu_over_vllm": ("<=", 1.5),
    "streams_callback_max_ms": ("<=", 50),
    "streams_unary_p99_over_few": ("<=", 2),
    "one_key_callback_max_ms": ("<=", 50),
    "one_key_unary_p99_over_few": ("<=", 2),
    "greedy_key_other_p50_over_alone": ("<=", 1.5),
    "greedy_key_other_p99_over_alone": ("<=", 1.5),
    "prefix_hits_over_sticky": (">=", 0.95),
    "throughput_over_least_loaded": (">=", 1.2),
    "throughput_over_rose_rule": (">=", 1.0),
}


def promised_figures(found: Mapping[str, Any]) -> dict[str, float | None]:
    """All promised figures; None for those that were not measured."""
    return {name: found.get(name) for name in PROMISED_BOUNDS}


def figure_rows(figures: Mapping[str, float | None], reasons: Mapping[str, str]) -> list[str]:
    """A line for each figure: its value and bound, or why there is none."""
    return [_row(name, value, reasons.get(name, "")) for name, value in figures.items()]


def _row(name: str, value: float | None, reason: str) -> str:
    way, bound = PROMISED_BOUNDS[name]
    if value is None:
        return f"{name:32}{'-':>10}   {reason}"
    kept = value <= bound if way == "<=" else value >= bound
    return f"{name:32}{value:>10.4g}   {way} {bound:g}{'' if kept else '   NOT KEPT'}"
