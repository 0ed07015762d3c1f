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
    ("of oracle", "share_of_oracle", "{:>9.3f}"),
    ("of plateau 1st", "share_of_plateau_first", "{:>14.3f}"),
    ("of bound", "share_of_bound", "{:>8.3f}"),
    ("of blind", "share_of_blind", "{:>8.3f}"),
    ("twice %", "share_generated_twice", "{:>8.4f}"),
    ("attempts", "attempts_per_rollout", "{:>8.3f}"),
    ("moves", "moves", "{:>6d}"),
    ("moves each", "moves_per_rollout", "{:>10.3f}"),
)
#: Whom speed is compared with: its share of theirs over the same steps.
LEGEND: Final = {
    "share_of_fair_oracle": "the fair oracle knows every length and every loss, but pays for boots, pulls, "
    "hand-overs and prefill what everybody pays",
    "share_of_oracle": "the oracle is the clairvoyant longest-first schedule on the same fleet, engines and slots: it "
    "knows every length, its moves cost next to nothing, and losses are announced just before and cost it nothing",
    "share_of_plateau_first": "the oracle with one freedom more, to leave slots empty: it fills an engine only up to "
    "its plateau, so that shorter rollouts do not slow down the longest; where there are more slots than that, it "
    "is the stronger of the two",
    "share_of_bound": "the bound knows every length and preempts and moves at every moment for nothing (the level "
    "algorithm): no schedule on real engines reaches it",
    "share_of_blind": "blind has the powers of the bound but knows no length: all rollouts that have not ended share "
    "all the speed there is",
}
SHARES: Final = tuple(LEGEND)


def table(cases: Iterable[dict[str, Any]]) -> str:
    """The cases one under the other, a line per policy; then whom the shares are of."""
    legend = ["", *(f"{share.removeprefix('share_')}: {what}" for share, what in LEGEND.items())]
    return "\n".join([*(line for case in cases for line in _lines(case)), *legend])


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
