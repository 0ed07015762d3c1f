"""Draws a replay beside rollouts over time: load, TTFT and TPOT of each request, budget and speed of rollouts."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ebbtide.demo.coserving.coserving_records import (
    BudgetMoment,
    ReplayRecord,
    ServedAnswer,
    attained,
    inside,
    tpots,
    ttfts,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE: Final = (14.0, 10.0)  # inches
_HEIGHTS: Final = (2, 3, 3, 2, 2)
_SERVING, _OVER, _ROLLOUTS, _TRAINER, _TARGET = "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#7f7f7f"
#: Seconds over which a speed is averaged: enough for several steps, few enough to show a burst.
_BIN_S: Final = 0.5


def write_coserving_picture(replay: ReplayRecord, path: Path) -> None:
    """Writes a PNG. Requests that missed their target are red; labels above name the parts of the replay."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, rows = plt.subplots(5, 1, figsize=_SIZE, sharex=True, height_ratios=_HEIGHTS, layout="constrained")
    load, ttft, tpot, budget, speed = rows
    zero = _zero(replay)
    try:
        _draw_load(load, replay, zero)
        _draw_latency(ttft, replay, zero, "TTFT", lambda one: one.ttft_s, replay.ttft_s)
        _draw_latency(tpot, replay, zero, "TPOT", lambda one: one.tpot_s, replay.tpot_s)
        _draw_budget(budget, replay.moments, zero)
        _draw_speed(speed, replay.moments, zero)
        for axes in rows:
            _draw_stretches(axes, replay, zero)
            axes.spines[["top", "right"]].set_visible(False)
            axes.margins(x=0.005)
        _name_stretches(load, replay, zero)
        speed.set_xlabel("seconds")
        figure.suptitle(_title(replay), x=0.01, ha="left")
        figure.savefig(path, dpi=120)
    finally:
        plt.close(figure)


def _zero(replay: ReplayRecord) -> float:
    begins = [part.begin_s for part in replay.stretches] + [one.sent for one in replay.answers[:1]]
    return min(begins + [one.at_s for one in replay.moments[:1]], default=0.0)


def _title(replay: ReplayRecord) -> str:
    parts = [replay.title, f"{len(replay.answers):,} requests"]
    if failed := sum(bool(one.failed) for one in replay.answers):
        parts.append(f"{failed:,} of them failed")
    for name, values, target in (
        ("TTFT", ttfts(replay.answers), replay.ttft_s),
        ("TPOT", tpots(replay.answers), replay.tpot_s),
    ):
        if target and values:
            parts.append(f"{name} ≤ {1e3 * target:,.0f} ms: {attained(values, target):.1%}")
    return ", ".join(parts)


def _draw_load(axes: "Axes", replay: ReplayRecord, zero: float) -> None:
    steps = inside(replay.answers)
    axes.fill_between(
        [at - zero for at, _ in steps], [count for _, count in steps], step="post", color=_SERVING, alpha=0.6, lw=0
    )
    axes.set_ylabel("requests\ninside")
    axes.set_ylim(bottom=0)


def _draw_latency(
    axes: "Axes", replay: ReplayRecord, zero: float, name: str, of: Callable[[ServedAnswer], float], target: float
) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    shown = [one for one in replay.answers if not one.failed and of(one) > 0]
    colours = [_OVER if target and of(one) > target else _SERVING for one in shown]
    axes.scatter([one.sent - zero for one in shown], [1e3 * of(one) for one in shown], s=7, c=colours, lw=0)
    if target:
        axes.axhline(1e3 * target, color=_TARGET, ls="--", lw=1)
        axes.text(
            1.0, 1e3 * target, f"{1e3 * target:,.0f} ms ", transform=axes.get_yaxis_transform(), fontsize=8,
            color=_TARGET, ha="right", va="bottom",
        )  # fmt: skip
    if shown:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel(f"{name}, ms")


def _draw_budget(axes: "Axes", moments: Sequence[BudgetMoment], zero: float) -> None:
    at = [one.at_s - zero for one in moments]
    axes.fill_between(at, [one.tokens for one in moments], step="post", color=_ROLLOUTS, alpha=0.4, lw=0)
    axes.set_ylabel("budget, tokens\nof a step")
    axes.set_ylim(bottom=0)


def _draw_speed(axes: "Axes", moments: Sequence[BudgetMoment], zero: float) -> None:
    speeds = _speeds(moments)
    axes.step([at - zero for at, _ in speeds], [speed for _, speed in speeds], where="post", color=_ROLLOUTS, lw=1)
    training = [one.training for one in moments]
    if any(training):
        at = [one.at_s - zero for one in moments]
        axes.fill_between(
            at, 0, 0.06, where=training, transform=axes.get_xaxis_transform(), color=_TRAINER, lw=0, step="post",
            label="the trainer may run",
        )  # fmt: skip
        axes.legend(loc="upper right", frameon=False, fontsize=8)
    axes.set_ylabel("rollouts,\ntokens/s")
    axes.set_ylim(bottom=0)


def _speeds(moments: Sequence[BudgetMoment]) -> list[tuple[float, float]]:
    """Returns (time, tokens per second from then on). A restarted engine counts from 0 again."""
    if not moments:
        return []
    found, first = [], moments[0]
    for one in moments[1:]:
        if (span := one.at_s - first.at_s) >= _BIN_S:
            found.append((first.at_s, max(0, one.generated - first.generated) / span))
            first = one
    return [*found, (first.at_s, 0.0)]


def _draw_stretches(axes: "Axes", replay: ReplayRecord, zero: float) -> None:
    for number, part in enumerate(replay.stretches):
        if number % 2 == 0:
            axes.axvspan(part.begin_s - zero, part.end_s - zero, color="#f4f4f4", zorder=0)


def _name_stretches(axes: "Axes", replay: ReplayRecord, zero: float) -> None:
    for part in replay.stretches:
        middle = (part.begin_s + part.end_s) / 2 - zero
        axes.text(middle, 1.0, part.name, transform=axes.get_xaxis_transform(), fontsize=9, ha="center", va="bottom")
