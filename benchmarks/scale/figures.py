"""Chooses what the benchmark promises out of all that it found, and prints it."""

from collections.abc import Mapping
from typing import Any, Final

#: The figures by name, each with what is promised of it at most; None: nothing by itself.
PROMISED: Final[dict[str, float | None]] = {
    "workers": None,
    "workers_lost_unasked": 0.0,
    "longest_death_notice_s": 10.0,
    "callback_p99_ms": 20.0,
    "callback_max_ms": 150.0,
    "decision_p99_ms": 25.0,
    "takeover_s": 10.0,
    "terms_per_kill": 1.0,
    "lease_lapses_after_takeover": 0.0,
    "store_bytes_per_finished": 1.0,
    "coordinator_bytes_per_finished": 12.0,
    "cpu_s_per_million_tokens": None,
    "ack_p99_ms": None,
    "ack_tail_over_raw_redis": 10.0,  # 5 to 6; 24 and 32 at two former commits, whose long callbacks came now and then
    "http_disagreements": 0.0,
    "tokens_lost": 0.0,
}
_LOST: Final = ("tokens_lost", "growth_tokens_lost", "token_path_tokens_lost")


def chosen(found: Mapping[str, Any]) -> dict[str, Any]:
    """The promised figures that were measured."""
    figures = {name: found[name] for name in PROMISED if name in found}
    if lost := [found[name] for name in _LOST if name in found]:
        figures["tokens_lost"] = sum(lost)
    return figures


def missing(found: Mapping[str, Any]) -> dict[str, str]:
    """Why a promised figure is not there."""
    return dict.fromkeys(PROMISED.keys() - chosen(found).keys(), "its part did not run")


def beyond(figures: Mapping[str, Any], factor: float) -> list[str]:
    """The figures above `factor` times what is promised. Where 0 is promised, up to `factor` is allowed."""
    promised = {name: most for name, most in PROMISED.items() if most is not None}
    return [name for name, value in figures.items() if name in promised and value > factor * (promised[name] or 1.0)]


def table(told: Mapping[str, Any]) -> str:
    """The promised figures, one a line, beside the promise and the other checkout's."""
    baseline = told.get("baseline", {}).get("figures", {})
    lines = [f"{'':34}{'measured':>14}{'promised':>12}{'baseline':>14}"]
    for name, value in told["figures"].items():
        most = PROMISED[name]
        promise = "" if most is None else f"<= {most:g}"
        lines.append(f"{name:34}{value:>14,}{promise:>12}{baseline.get(name, ''):>14}")
    lines += [f"{name:34}{'-':>14}  {why}" for name, why in sorted(told["missing"].items())]
    return "\n".join(lines)
