"""The outcomes of a replay as a table, and what its columns mean."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

_COLUMNS: Final = (
    ("policy", "policy", "{:<38}"),
    ("steps", "steps", "{:>5d}"),
    ("step s", "mean_step_s", "{:>8.1f}"),
    ("tokens/s", "tokens_per_s", "{:>9.0f}"),
    ("x first", "over_first", "{:>8.3f}"),
    ("of fair", "share_of_fair_oracle", "{:>7.3f}"),
    ("twice %", "share_generated_twice", "{:>8.4f}"),
    ("attempts", "attempts_per_rollout", "{:>8.3f}"),
    ("moves", "moves", "{:>6d}"),
    ("moves each", "moves_per_rollout", "{:>10.3f}"),
)
LEGEND: Final = (
    "the fair oracle knows every length and every loss, but pays for boots, pulls, hand-overs and prefill what "
    "everybody pays"
)


def table(cases: Iterable[dict[str, Any]]) -> str:
    """The cases one under the other, a line per policy; then whom the shares are of."""
    return "\n".join([*(line for case in cases for line in _lines(case)), "", LEGEND])


def _lines(case: dict[str, Any]) -> Sequence[str]:
    title = ", ".join(f"{key} {value}" for key, value in case.items() if key != "policies")
    head = "  ".join(_widen(title, form) for title, _, form in _COLUMNS)
    rows = ["  ".join(form.format(_shown(key, row[key])) for _, key, form in _COLUMNS) for row in case["policies"]]
    return ["", title, head, *rows]


def _widen(title: str, form: str) -> str:
    align, width = form[2], form[3:].rstrip("}").split(".")[0].rstrip("d")
    return f"{title:{align}{width}}"


def _shown(key: str, value: Any) -> Any:
    return 100.0 * value if key == "share_generated_twice" else value
