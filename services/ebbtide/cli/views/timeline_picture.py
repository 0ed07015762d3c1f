"""Draws a run's attempts in time: a band per worker, and a bar per attempt, coloured by policy version."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ebbtide.claimed_runs.device_turns import HELD, LENT, RETURNING
from ebbtide.cli.views.timeline import OWNERS, Timeline, version_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Inches. A row takes at least a pixel, up to the height of a page.
_WIDTH: Final = 16.0
_LOWEST: Final = 3.0
_HIGHEST: Final = 24.0
_ROW: Final = 0.09
_GAP: Final = 2.0  # rows between bands
_LABELLED: Final = 30  # versions whose numbers fit above the picture
_NONE: Final = "#c8c8c8"
#: Rows of the band of the trainer's devices, and its colours by who has them.
_DEVICE_ROWS: Final = 4.0
TURN_COLOURS: Final = {HELD: "#9467bd", LENT: "#2ca02c", RETURNING: "#ff7f0e"}
_MARKS: Final[dict[str, tuple[str, str]]] = {  # state -> colour, marker
    "lost": ("#d62728", "X"),
    "suspected": ("#d62728", "o"),
    "shunned": ("#ff7f0e", "s"),
    "draining": ("#ff7f0e", "v"),
    "left": ("#7f7f7f", "X"),
    "went_over": ("#1f77b4", ">"),
}


def write_timeline_picture(timeline: Timeline, path: Path) -> None:
    """Writes a PNG. A bar ends in a red edge if the worker did not finish the rollout."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    offsets, height = _offsets(timeline)
    inches = min(_HIGHEST, max(_LOWEST, 1.5 + _ROW * height))
    figure, axes = plt.subplots(figsize=(_WIDTH, inches), layout="constrained")
    try:
        _draw_bands(axes, timeline, offsets)
        _draw_turns(axes, timeline)
        _draw_spans(axes, timeline, offsets)
        _draw_marks(axes, timeline, offsets)
        axes.set_ylim(height, -_GAP)
        axes.margins(x=0.01)
        axes.set_xlabel("seconds since the run was submitted")
        axes.set_title(_title(timeline), loc="left", pad=18)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, dpi=120)
    finally:
        plt.close(figure)


def _offsets(timeline: Timeline) -> tuple[dict[str, float], float]:
    """Returns worker -> its first row in the picture, and the number of rows."""
    offsets: dict[str, float] = {}
    at = _DEVICE_ROWS + _GAP if timeline.turns else 0.0
    for worker in timeline.lanes:
        offsets[worker] = at
        at += timeline.rows(worker) + _GAP
    return offsets, max(at, 1.0)


def _title(timeline: Timeline) -> str:
    spans = list(timeline.spans)
    cut = sum(not span.finished for span in spans)
    tokens = sum(span.last - span.first for span in spans)
    return (
        f"{timeline.run_id}: {len(spans):,} attempts on {len(timeline.lanes)} workers, {cut:,} of them not finished "
        f"there, {tokens:,} tokens"
    )


def _draw_bands(axes: "Axes", timeline: Timeline, offsets: Mapping[str, float]) -> None:
    middles = [_DEVICE_ROWS / 2] if timeline.turns else []
    for number, worker in enumerate(timeline.lanes):
        rows = timeline.rows(worker)
        middles.append(offsets[worker] + rows / 2)
        if number % 2 == 0:
            axes.axhspan(offsets[worker] - _GAP / 2, offsets[worker] + rows + _GAP / 2, color="#f4f4f4", zorder=0)
    names = [*(["trainer's devices"] if timeline.turns else []), *timeline.lanes]
    axes.set_yticks(middles, names, fontsize=8)
    axes.tick_params(axis="y", length=0)


def _draw_turns(axes: "Axes", timeline: Timeline) -> None:
    """Draws who has the trainer's devices, above all workers."""
    for state, colour in TURN_COLOURS.items():
        spans = [(turn.begin_s, turn.end_s - turn.begin_s) for turn in timeline.turns if turn.state == state]
        if spans:
            label = f"the device {OWNERS[state]}"
            axes.broken_barh(spans, (0.0, _DEVICE_ROWS), facecolors=colour, linewidth=0, zorder=2, label=label)


def _draw_spans(axes: "Axes", timeline: Timeline, offsets: Mapping[str, float]) -> None:
    import matplotlib as mpl
    from matplotlib.collections import LineCollection, PolyCollection

    versions = sorted({span.first_version for span in timeline.spans} - {0})
    # The lightest yellow would not be seen on white.
    scale: Any = mpl.colormaps["viridis"]
    norm = mpl.colors.Normalize(min(versions, default=0), max(max(versions, default=0), min(versions, default=0) + 1))
    boxes, colours, edges = [], [], []
    for worker, lanes in timeline.lanes.items():
        for lane in lanes:
            span, top = lane.span, offsets[worker] + lane.row
            low, high = top + 0.08, top + 0.92
            boxes.append([(span.begin_s, low), (span.end_s, low), (span.end_s, high), (span.begin_s, high)])
            colours.append(scale(0.92 * float(norm(span.first_version))) if span.first_version else _NONE)
            if not span.finished:
                edges.append([(span.end_s, top), (span.end_s, top + 1)])
    axes.add_collection(PolyCollection(boxes, facecolors=colours, edgecolors="none", zorder=2))
    axes.add_collection(LineCollection(edges, colors="#d62728", linewidths=1.2, zorder=3))
    axes.autoscale_view()
    if len(versions) > 1:
        shown = mpl.cm.ScalarMappable(norm, mpl.colors.ListedColormap([scale(0.92 * x / 255) for x in range(256)]))
        ticks = mpl.ticker.MaxNLocator(integer=True)
        label = "policy version of the first token"
        axes.figure.colorbar(shown, ax=axes, label=label, ticks=ticks, pad=0.01, fraction=0.02)


def _draw_marks(axes: "Axes", timeline: Timeline, offsets: Mapping[str, float]) -> None:
    versions = [event for event in timeline.marks if event.kind == "version"]
    for event in versions:
        axes.axvline(event.age_s, color="#1f77b4", linewidth=0.6, alpha=0.6, zorder=1)
        if len(versions) <= _LABELLED:
            axes.text(
                event.age_s, 1.0, f"v{version_of(event)}", transform=axes.get_xaxis_transform(), fontsize=7,
                color="#1f77b4", ha="center", va="bottom",
            )  # fmt: skip
    for state, (colour, marker) in _MARKS.items():
        marked = [event for event in timeline.marks if event.kind == "worker" and event.labels["state"] == state]
        if not marked:
            continue
        for event in marked:
            top = offsets[event.labels["worker"]]
            axes.vlines(event.age_s, top, top + timeline.rows(event.labels["worker"]), color=colour, zorder=4)
        heights = [offsets[event.labels["worker"]] - _GAP / 4 for event in marked]
        at = [event.age_s for event in marked]
        axes.scatter(at, heights, color=colour, marker=marker, s=28, zorder=5, label=state)
    if axes.get_legend_handles_labels()[0]:
        axes.figure.legend(loc="outside lower left", ncols=len(_MARKS) + len(TURN_COLOURS), frameon=False, fontsize=8)
