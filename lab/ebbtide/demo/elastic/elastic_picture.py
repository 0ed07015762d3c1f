"""Draws both pools of the elastic demo: who had which machine when, and tokens over time and over money;
and, for the terminal, who had which when in characters."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ebbtide.cli.views.timeline import OWNERS, TURN_COLOURS
from ebbtide.demo.elastic.elastic_report import ElasticReport, PoolRun, spent
from ebbtide.types.device_turns import HELD, LENT, RETURNING, DeviceTurn

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE: Final = (12.0, 8.0)  # inches
_THERE, _BOOTS, _RESERVED = "#1f77b4", "#aec7e8", "#7f7f7f"
_HEIGHT: Final = 0.8  # of a bar, in rows


def write_elastic_picture(report: ElasticReport, path: Path) -> None:
    """Writes a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, rows = plt.subplot_mosaic("AA;BC", figsize=_SIZE, height_ratios=(3, 2), layout="constrained")
    try:
        _draw_machines(rows["A"], report)
        _draw_tokens(rows["B"], report, money=False)
        _draw_tokens(rows["C"], report, money=True)
        for axes in rows.values():
            axes.spines[["top", "right"]].set_visible(False)
        figure.suptitle(_title(report), x=0.01, ha="left")
        figure.savefig(path, dpi=120)
    finally:
        plt.close(figure)


def _title(report: ElasticReport) -> str:
    faster, cheaper = report.throughput_over_fixed, report.tokens_per_money_over_fixed
    return (
        f"elastic over fixed: {faster:.2f} times the tokens per second, {cheaper:.2f} times per money (assumed prices: "
        f"{report.prices.reserved:g} reserved, {report.prices.spot:g} spot)"
    )


def _draw_machines(axes: "Axes", report: ElasticReport) -> None:
    names: list[str] = []
    for run in report.runs:
        _draw_device(axes, run, len(names))
        names.append(f"{run.name}: trainer's device")
        for core in sorted({stay.core for stay in run.stays}):
            _draw_spot(axes, run, core, len(names))
            names.append(f"{run.name}: spot core {core}")
        if run.reserved > 1:
            _bar(axes, [(0.0, run.counted[1])], len(names), _RESERVED, "a reserved machine is there")
            names.append(f"{run.name}: reserved")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlabel("seconds since the run was submitted")
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    axes.legend(once.values(), once.keys(), loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False, fontsize=8)


def _draw_device(axes: "Axes", run: PoolRun, row: int) -> None:
    end_s = run.counted[1]
    turns = run.turns or [DeviceTurn(HELD, 0.0, end_s)]
    for state, colour in TURN_COLOURS.items():
        spans = [(one.begin_s, min(one.end_s, end_s)) for one in turns if one.state == state and one.begin_s < end_s]
        label = f"the device {OWNERS[state]}" if run.turns else "the device is the trainer's alone"
        _bar(axes, spans, row, colour if run.turns else "#c5b0d5", label)
    ends = list(run.step_at_s.values())
    axes.vlines(ends, row - 0.5, row - _HEIGHT / 2, color="#333333", lw=0.8, label="a step ends")


def _draw_spot(axes: "Axes", run: PoolRun, core: int, row: int) -> None:
    end_s, stays = run.counted[1], [stay for stay in run.stays if stay.core == core and stay.begin_s < run.counted[1]]
    gone = [min(end_s, stay.end_s or end_s) for stay in stays]
    ready = [one if stay.ready_s is None else min(one, stay.ready_s) for stay, one in zip(stays, gone, strict=True)]
    _bar(axes, [(stay.begin_s, to) for stay, to in zip(stays, ready, strict=True)], row, _BOOTS, "a spot machine boots")
    _bar(axes, list(zip(ready, gone, strict=True)), row, _THERE, "a spot machine is there")


def _bar(axes: "Axes", spans: list[tuple[float, float]], row: int, colour: str, label: str) -> None:
    shown = [(begin_s, end_s - begin_s) for begin_s, end_s in spans if end_s > begin_s]
    if shown:
        axes.broken_barh(shown, (row - _HEIGHT / 2, _HEIGHT), facecolors=colour, linewidth=0, label=label)


def _draw_tokens(axes: "Axes", report: ElasticReport, *, money: bool) -> None:
    """Draws trained tokens over seconds or over money, from the end of the first step on."""
    for run, colour in zip(report.runs, (_THERE, _RESERVED), strict=True):
        begin_s, tokens, found = run.counted[0], 0, [(0.0, 0.0)]
        for step, at_s in sorted(run.step_at_s.items()):
            if step > 1:
                tokens += run.step_tokens.get(step, 0)
                over = spent(run, report.prices, begin_s, at_s) if money else at_s - begin_s
                found.append((over, tokens / 1000))
        axes.plot([x for x, _ in found], [y for _, y in found], "o-", ms=3, color=colour, label=run.name)
    axes.set_xlabel("money, by assumed prices" if money else "seconds since the first step")
    axes.set_ylabel("thousand tokens trained on")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)


_NAMES: Final = 18  # columns of the rows' names
_BARS: Final = {HELD: "█", LENT: "░", RETURNING: "▒"}
_LEGEND: Final = "█ trains  ░ generates  ▒ comes back   · boots  ━ is there  (blank) is gone   ┊ a step ends"


def owner_strips(runs: list[PoolRun], width: int = 100) -> list[str]:
    """Draws all runs on one scale of time: a row for the trainer's device, one for steps, one for each spot core."""
    end_s = max(run.counted[1] for run in runs)
    columns = max(10, width - _NAMES - 1)
    lines = [line for run in runs for line in _strip(run, columns, end_s)]
    return [*lines, f"{'':{_NAMES}} 0 to {end_s:.0f} s; {_LEGEND}"]


def _strip(run: PoolRun, columns: int, end_s: float) -> Iterator[str]:
    steps = {min(columns - 1, int(at_s / end_s * columns)) for at_s in run.step_at_s.values()}
    yield f"{run.name:{_NAMES}} {''.join('┊' if column in steps else ' ' for column in range(columns)).rstrip()}"
    yield _strip_row(run, "trainer's device", partial(_owner_bar, run), columns, end_s)
    for core in sorted({stay.core for stay in run.stays}):
        yield _strip_row(run, f"spot core {core}", partial(_machine_bar, run, core), columns, end_s)
    if reserved := run.reserved - 1:
        name = "reserved workers" if reserved > 1 else "reserved worker"
        yield _strip_row(run, name, lambda _: "━", columns, end_s)


def _strip_row(run: PoolRun, name: str, of: Callable[[float], str], columns: int, end_s: float) -> str:
    """Draws what `of` says of the middle of each column, up to the run's last step."""
    middles = ((column + 0.5) * end_s / columns for column in range(columns))
    cells = [of(at_s) for at_s in middles if at_s <= run.counted[1]]
    return f"{f'  {name}':{_NAMES}} {''.join(cells).rstrip()}"


def _owner_bar(run: PoolRun, at_s: float) -> str:
    if not run.turns:
        return _BARS[HELD]
    return next((_BARS[turn.state] for turn in run.turns if turn.begin_s <= at_s < turn.end_s), " ")


def _machine_bar(run: PoolRun, core: int, at_s: float) -> str:
    for stay in run.stays:
        if stay.core == core and stay.begin_s <= at_s < (math.inf if stay.end_s is None else stay.end_s):
            return "━" if stay.ready_s is not None and at_s >= stay.ready_s else "·"
    return " "
