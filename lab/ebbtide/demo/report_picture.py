"""Draws the report's curves, as a picture and for the terminal."""

from pathlib import Path
from typing import Any

from ebbtide.demo.demo_report import DemoReport

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_MARGIN = "    "


def write_picture(report: DemoReport, path: Path) -> None:
    """Draws the reward of each step, the accuracy of each evaluation, the kills, and each version's bytes."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (axes, below) = plt.subplots(2, 1, figsize=(9, 7), sharex=True, height_ratios=(5, 2), layout="constrained")
    steps = range(1, len(report.rewards) + 1)
    axes.plot(steps, report.rewards, color="#1f77b4", label="mean reward of the step's rollouts")
    found = report.evaluations
    label = "accuracy on unseen problems" if found else "_nothing was evaluated"  # matplotlib hides such labels
    axes.plot([one.step for one in found], [one.accuracy for one in found], "o--", color="#d62728", label=label)
    for kill in report.kills:
        axes.axvline(kill.step + 0.5, color="#7f7f7f", linestyle=":")
        axes.text(kill.step + 0.6, 0.02, f"{kill.program} killed", rotation=90, color="#7f7f7f", fontsize=8)
    axes.set(ylim=(0, 1), title=f"{report.run_id}, seed {report.seed}")
    axes.legend(loc="upper left", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    _draw_weights(report, below)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_weights(report: DemoReport, axes: Any) -> None:
    """Draws the bytes of each version as published and as dense."""
    found = report.weights.published
    steps = [one.step for one in found]
    axes.plot(steps, [one.dense_bytes / 1e6 for one in found], color="#7f7f7f", label="dense")
    axes.bar(steps, [one.bytes / 1e6 for one in found], color="#1f77b4", label="published")
    axes.set(xlabel="optimiser step", ylabel="MB per version", ylim=(0, None))
    axes.legend(loc="lower left")
    axes.spines[["top", "right"]].set_visible(False)


def terminal_curve(report: DemoReport, width: int = 80, height: int = 10) -> str:
    """Draws rewards as blocks, from 0 in the lowest row to 1; `o` is an accuracy, a dotted column a kill."""
    columns = width - len(_MARGIN) - 1
    stretch = max(1, columns // max(1, report.steps + 1))
    span = min(columns, (report.steps + 1) * stretch)

    def column(step: float) -> int:
        return min(span - 1, round(step / max(1, report.steps) * (span - 1)))

    rows = [[" "] * span for _ in range(height)]
    for at in range(span):
        step = round(at / max(1, span - 1) * report.steps)
        if 0 < step <= len(report.rewards):
            _fill(rows, at, report.rewards[step - 1])
    for kill in report.kills:
        for row in rows:
            row[column(kill.step + 0.5)] = "┊"
    for one in report.evaluations:
        rows[height - 1 - min(height - 1, int(one.accuracy * height))][column(one.step)] = "o"
    labels = {0: "1.0 ", height // 2: "0.5 ", height - 1: "0.0 "}
    lines = [labels.get(number, _MARGIN) + "│" + "".join(row) for number, row in enumerate(rows)]
    return "\n".join([*lines, f"{_MARGIN}└{'─' * span}", f"{_MARGIN} step 0 to {report.steps}; o accuracy, ┊ a kill"])


def _fill(rows: list[list[str]], at: int, value: float) -> None:
    """Fills a column from below up to `value` of 0..1, to an eighth of a row."""
    eighths = round(max(0.0, min(1.0, value)) * len(rows) * 8)
    for number, row in enumerate(reversed(rows)):
        row[at] = _EIGHTHS[max(0, min(8, eighths - 8 * number))]
