"""Draws what simulations came to.

The same outcomes give the same bytes with the same matplotlib: nothing in the file tells a time or a version.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ebbtide.simulator.outcome import Outcome, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_DOTS_PER_INCH: Final = 120
#: Inches. A machine takes two pixels at least; more machines than fit are left out, and the picture says so.
_WIDTH: Final = 14.0
_FLEET: Final = 1.3
_ROW: Final = 0.16
_LEAST_ROW: Final = 2 / _DOTS_PER_INCH
_LOWEST: Final = 0.8
_HIGHEST: Final = 8.0
_MOST_MACHINES: Final = int(_HIGHEST / _LEAST_ROW)
_LABELLED: Final = 50  # machines whose names fit beside the picture
_MARKED: Final = 200  # ends of steps beyond which the lines would hide the machines
_STATES: Final = {
    "booting": "#f2c14e",
    "installing": "#8e6bbf",
    "training": "#2f6f4f",
    "held": "#c9c9c9",
    "lost": "#d62728",
    "idle": "#f3f3f3",
}
#: Of runs, in the order of their names; after these the colours begin again.
_RUNS: Final = ("#1f77b4", "#e07b39", "#17a398", "#b5446e", "#6a8d2f", "#7a6c5d")


def write_outcome_picture(outcomes: Sequence[Outcome], path: Path) -> None:
    """Writes a PNG with two panels for each outcome: the fleet's size, and its machines. Raises `OSError`."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = [_machines(outcome.spans) for outcome in outcomes]
    heights = [height for found in rows for height in (_FLEET, _height(len(found)))]
    size = (_WIDTH, sum(heights) + 1.1 * len(outcomes))
    figure, axes = plt.subplots(
        len(heights), 1, figsize=size, layout="constrained", height_ratios=heights, squeeze=False
    )
    try:
        for number, (outcome, found) in enumerate(zip(outcomes, rows, strict=True)):
            _draw(axes[2 * number][0], axes[2 * number + 1][0], outcome, found)
        figure.savefig(path, format="png", dpi=_DOTS_PER_INCH, metadata={"Software": None})
    finally:
        plt.close(figure)


def _machines(spans: Iterable[Span]) -> dict[str, int]:
    """machine -> its row: machines of a pool stand together, pools and machines in the order of their first span."""
    pools: dict[str, dict[str, None]] = {}
    for span in spans:
        pools.setdefault(span.pool, {})[span.machine] = None
    names = [machine for pool in pools.values() for machine in pool]
    return {machine: row for row, machine in enumerate(names[:_MOST_MACHINES])}


def _height(machines: int) -> float:
    return min(_HIGHEST, max(_LOWEST, machines * _ROW))


def _draw(fleet: "Axes", machines: "Axes", outcome: Outcome, rows: Mapping[str, int]) -> None:
    end = max(outcome.simulated_s, 1e-9)
    fleet.set_title(_title(outcome, len(rows)), loc="left", fontsize=10)
    _draw_fleet(fleet, outcome, end)
    _draw_machines(machines, outcome, rows)
    for axes in (fleet, machines):
        axes.set_xlim(0, end)
        axes.spines[["top", "right"]].set_visible(False)
        _draw_steps(axes, outcome)
    fleet.tick_params(labelbottom=False)
    machines.set_xlabel("simulated seconds")


def _title(outcome: Outcome, shown: int) -> str:
    machines = len({span.machine for span in outcome.spans})
    left_out = f"; {machines - shown} of {machines} machines are not shown" if shown < machines else ""
    return f"{outcome.scenario} (simulated, seed {outcome.seed}): {len(outcome.steps):,} steps{left_out}"


def _draw_fleet(axes: "Axes", outcome: Outcome, end: float) -> None:
    from matplotlib.ticker import MaxNLocator

    pools: dict[str, list[tuple[float, int]]] = {}
    for second, pool, count in outcome.fleet:
        pools.setdefault(pool, []).append((second, count))
    for pool, changes in pools.items():
        seconds = [second for second, _ in changes]
        counts = [count for _, count in changes]
        axes.step([*seconds, end], [*counts, counts[-1]], where="post", label=pool, linewidth=1.4)
    axes.set_ylabel("machines")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    if pools:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)


def _draw_machines(axes: "Axes", outcome: Outcome, rows: Mapping[str, int]) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    runs = sorted({span.run for span in outcome.spans if span.state == "generating"})
    colours = {run: _RUNS[number % len(_RUNS)] for number, run in enumerate(runs)}
    boxes: list[Any] = []
    shades: list[str] = []
    for span in outcome.spans:
        if (row := rows.get(span.machine)) is not None and span.end_s > span.begin_s:
            low, high = row + 0.08, row + 0.92
            boxes.append([(span.begin_s, low), (span.end_s, low), (span.end_s, high), (span.begin_s, high)])
            shades.append(colours[span.run] if span.state == "generating" else _STATES.get(span.state, "#000000"))
    axes.add_collection(PolyCollection(boxes, facecolors=shades, edgecolors="none", zorder=2))
    axes.set_ylim(max(len(rows), 1), 0)
    labelled = rows if len(rows) <= _LABELLED else {}
    axes.set_yticks([row + 0.5 for row in labelled.values()], list(labelled), fontsize=7)
    axes.tick_params(axis="y", length=0)
    shown = {f"generating {run}".rstrip(): colours[run] for run in runs}
    shown |= {state: _STATES[state] for state in _STATES if any(span.state == state for span in outcome.spans)}
    if shown:
        patches = [Patch(facecolor=colour, label=name) for name, colour in shown.items()]
        axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)


def _draw_steps(axes: "Axes", outcome: Outcome) -> None:
    if len(outcome.steps) <= _MARKED:
        for step in outcome.steps:
            axes.axvline(step.trained_s, color="#444444", linewidth=0.6, alpha=0.6, zorder=3)
