"""Draws for the terminal who had the trainer's device when, and when spot machines were there."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from ebbtide.claimed_runs.device_turns import HELD, LENT, RETURNING
from ebbtide.demo.elastic.elastic_report import PoolRun

_LEFT: Final = 18
_OWNERS: Final = {HELD: "█", LENT: "░", RETURNING: "▒"}
_LEGEND: Final = "█ trains  ░ generates  ▒ comes back   · boots  ━ is there  (blank) is gone   ┊ a step ends"


def owner_strips(runs: list[PoolRun], width: int = 100) -> list[str]:
    """Draws all runs on one scale of time: a row for the trainer's device, one for steps, one for each spot core."""
    end_s = max(run.counted[1] for run in runs)
    columns = max(10, width - _LEFT - 1)
    lines = [line for run in runs for line in _strip(run, columns, end_s)]
    return [*lines, f"{'':{_LEFT}} 0 to {end_s:.0f} s; {_LEGEND}"]


def _strip(run: PoolRun, columns: int, end_s: float) -> Iterator[str]:
    steps = {min(columns - 1, int(at_s / end_s * columns)) for at_s in run.step_at_s.values()}
    yield f"{run.name:{_LEFT}} {''.join('┊' if column in steps else ' ' for column in range(columns)).rstrip()}"
    yield _row(run, "trainer's device", partial(_owner, run), columns, end_s)
    for core in sorted({stay.core for stay in run.stays}):
        yield _row(run, f"spot core {core}", partial(_machine, run, core), columns, end_s)
    if reserved := run.reserved - 1:
        name = "reserved workers" if reserved > 1 else "reserved worker"
        yield _row(run, name, lambda _: "━", columns, end_s)


def _row(run: PoolRun, name: str, of: Callable[[float], str], columns: int, end_s: float) -> str:
    """Draws what `of` says of the middle of each column, up to the run's last step."""
    middles = ((column + 0.5) * end_s / columns for column in range(columns))
    cells = [of(at_s) for at_s in middles if at_s <= run.counted[1]]
    return f"{f'  {name}':{_LEFT}} {''.join(cells).rstrip()}"


def _owner(run: PoolRun, at_s: float) -> str:
    if not run.turns:
        return _OWNERS[HELD]
    return next((_OWNERS[turn.state] for turn in run.turns if turn.begin_s <= at_s < turn.end_s), " ")


def _machine(run: PoolRun, core: int, at_s: float) -> str:
    for stay in run.stays:
        if stay.core == core and stay.begin_s <= at_s < (math.inf if stay.end_s is None else stay.end_s):
            return "━" if stay.ready_s is not None and at_s >= stay.ready_s else "·"
    return " "
