"""Names the figures of the long tail's benchmark, what is promised of each, and why one is missing."""

from collections.abc import Mapping
from typing import Any, Final

#: By name: the least and the greatest value that keep the promise.
PROMISED_RANGES: Final[dict[str, tuple[float, float]]] = {
    "throughput_over_verl": (1.0, float("inf")),
    "throughput_over_seer": (1.0, float("inf")),
    "share_of_true_lengths": (0.95, float("inf")),
    "error_vs_published_median": (0.0, float("inf")),
    "bias_cured_over_uncured": (0.0, 0.2),
    "engine_preemptions_share": (0.0, 0.01),
    "interval_coverage": (0.75, 0.85),
}
#: The part that measures each.
_PARTS: Final = {
    "throughput_over_verl": "seer",
    "throughput_over_seer": "seer",
    "share_of_true_lengths": "seer",
    "error_vs_published_median": "seer",
    "bias_cured_over_uncured": "bias",
    "engine_preemptions_share": "admission",
    "interval_coverage": "lengths",
}


def promised_figures(found: Mapping[str, Any]) -> dict[str, float | None]:
    """All promised figures; None for those that were not measured."""
    return {name: found.get(name) for name in PROMISED_RANGES}


def missing(figures: Mapping[str, float | None], failed: Mapping[str, str]) -> dict[str, str]:
    """Why figures are None. `failed`: parts, and why."""
    return {name: _why(_PARTS[name], failed) for name, value in figures.items() if value is None}


def _why(part: str, failed: Mapping[str, str]) -> str:
    return f"part {part} failed: {failed[part]}" if part in failed else f"part {part} was not run"


def figure_rows(figures: Mapping[str, float | None], reasons: Mapping[str, str]) -> list[str]:
    """A line for each figure: its value and range, or why there is none."""
    return [_row(name, value, reasons.get(name, "")) for name, value in figures.items()]


def _row(name: str, value: float | None, reason: str) -> str:
    least, most = PROMISED_RANGES[name]
    if value is None:
        return f"{name:36}{'-':>10}   {reason}"
    return f"{name:36}{value:>10.4f}   {least:g} to {most:g}{'' if least <= value <= most else '   NOT KEPT'}"
