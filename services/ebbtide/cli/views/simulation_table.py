"""Shows simulated scenarios side by side, with ratios to the first, and how far simulations have come."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Final, NamedTuple, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn
from rich.table import Table

from ebbtide.cli.views.tables import amount, cell, clock, data_table, plain, print_wide
from ebbtide.cli.waiting import Waiting
from ebbtide.simulator.outcome import SimulationProgress
from ebbtide.simulator.report.figures_file import ratios
from ebbtide.simulator.report.scenario_figures import Figures, ScenarioFigures
from ebbtide.simulator.report.seed_spread import SeedSpread

_MISSING: Final = "-"


class _Row(NamedTuple):
    name: str
    label: str
    text: Callable[[float], str]
    always: bool = True  # otherwise only if some scenario has it, and it is not 0


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"


def _seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 100 else f"{value:,.3g} s"


def _share(value: float) -> str:
    return f"{value:.1%}"


def _dollars(value: float) -> str:
    return f"${value:,.2f}" if value >= 0.1 or not value else f"${value:.3g}"


_SPEED: Final = (
    _Row("tokens_per_s", "tokens/s", _rate),
    _Row("steps", "steps", _count),
    _Row("step_s_median", "step, median", _seconds),
    _Row("step_s_p90", "step, p90", _seconds),
)
_OF_RUN: Final = (
    _Row("generation_s_median", "generation, median", _seconds),
    _Row("tail_s_median", "its last tenth, median", _seconds),
)
_REST: Final = (
    _Row("cost_per_hour", "cost per hour", _dollars, always=False),
    _Row("cost_per_step", "cost per step", _dollars, always=False),
    _Row("cost_per_million_tokens", "cost per million tokens", _dollars, always=False),
    _Row("tokens_lost", "tokens lost", _count),
    _Row("tokens_twice", "tokens made twice", _count),
    _Row("twice_share", "  of all tokens", _share),
    _Row("tokens_moved", "tokens moved", _count),
    _Row("tokens_reread", "tokens read again", _count),
    _Row("tokens_dropped", "tokens dropped on purpose", _count, always=False),
    _Row("moves", "moves", _count),
    _Row("losses", "machines lost", _count),
    _Row("drains", "machines drained", _count, always=False),
    _Row("preemptions", "preemptions by engines", _count, always=False),
    _Row("weight_bytes", "weights sent", amount),
    _Row("unfinished", "unfinished rollouts", _count, always=False),
)
_IDLE: Final = _Row("idle_share", "idle", _share)


def simulation_table(scenarios: Sequence[ScenarioFigures]) -> Table:
    """Tabulates scenarios, at least one. A cell has the median over seeds, then its spread if there are several."""
    first = scenarios[0]
    columns = ["", escape(plain(first.scenario))]
    for one in scenarios[1:]:
        columns += [escape(plain(one.scenario)), "ratio"]
    table = data_table(columns, left={""}, wraps=columns[1:])
    for row, found in _rows(scenarios):
        if not row.always and not any(one and one.high for one in (figures.get(row.name) for figures in found)):
            continue
        cells = [row.label]
        for number, figures in enumerate(found):
            cells.append(_text(figures.get(row.name), row.text))
            if number:
                cells.append(_ratio(found[0], figures, row.name))
        table.add_row(*map(cell, cells))
    return table


def print_simulation(scenarios: Sequence[ScenarioFigures]) -> None:
    """Prints the table, what its cells mean, and what is missing."""
    print_wide(simulation_table(scenarios))
    most = max((one for scenario in scenarios for one in scenario.whole.values() if one), key=lambda one: one.seeds)
    lines = [f"Simulated{_over_seeds(scenarios, most)}."]
    lines += [f"{scenario.scenario}: {note}" for scenario in scenarios for note in scenario.notes]
    for line in lines:
        print_wide(cell(line), style="dim")


def _over_seeds(scenarios: Sequence[ScenarioFigures], most: SeedSpread) -> str:
    seeds = scenarios[0].seeds
    if len(seeds) == 1:
        return f", seed {seeds[0]}"
    spread = "95 % interval of the median" if most.kind == "interval95" else "least..most"
    return f", seeds {seeds[0]} to {seeds[-1]}: median ({spread})"


def _rows(scenarios: Sequence[ScenarioFigures]) -> Iterator[tuple[_Row, list[Figures]]]:
    """Each row with the figures of every scenario that it is taken from."""
    whole = [scenario.whole for scenario in scenarios]
    runs = list(dict.fromkeys(run for scenario in scenarios for run in scenario.runs))
    yield from ((row, whole) for row in _SPEED)
    for run in runs:
        of_run = [scenario.runs.get(run, {}) for scenario in scenarios]
        rows = _OF_RUN if len(runs) == 1 else (*_SPEED[1:], *_OF_RUN)
        yield from ((_called(row, run if len(runs) > 1 else ""), of_run) for row in rows)
    for pool in dict.fromkeys(pool for scenario in scenarios for pool in scenario.pools):
        yield _called(_IDLE, pool), [scenario.pools.get(pool, {}) for scenario in scenarios]
    yield from ((row, whole) for row in _REST)


def _called(row: _Row, name: str) -> _Row:
    return row._replace(label=f"{plain(name)}: {row.label}") if name else row


def _text(found: SeedSpread | None, text: Callable[[float], str]) -> str:
    if found is None:
        return _MISSING
    if found.low == found.high:
        return text(found.median)
    return f"{text(found.median)} ({text(found.low)}..{text(found.high)})"


def _ratio(first: Figures, other: Figures, name: str) -> str:
    found = ratios(first, {name: other.get(name)})[name]
    return _MISSING if found is None else f"{found:.2f}"


class SimulationScreen:
    """Shows a bar for each scenario on a terminal's stderr, with simulated time, steps and speed; elsewhere a line
    now and then.

    Invariant: a bar is the mean of its seeds' shares. Nothing is stored.
    """

    def __init__(self, names: Sequence[str], console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(),
            TextColumn("{task.fields[told]}"),
            console=console, transient=True, disable=not console.is_terminal,
        )  # fmt: skip
        self._tasks = [self._bars.add_task(plain(name), total=1.0, told="") for name in names]
        self._began = time.monotonic()
        self._told = [[plain(name), ""] for name in names]  # two may have one name
        self._waiting = nullcontext() if console.is_terminal else Waiting(self._line)

    def __enter__(self) -> Self:
        self._bars.start()
        self._waiting.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting.__exit__(None, None, None)
        self._bars.stop()

    def show(self, scenario: int, seeds: Mapping[int, SimulationProgress], of: int) -> None:
        """Shows one scenario's progress: that of the seeds that have begun, of so many."""
        task: TaskID = self._tasks[scenario]
        share = sum(one.share for one in seeds.values()) / of
        told = progress_text(seeds, time.monotonic() - self._began)
        self._bars.update(task, completed=share, told=told)
        self._told[scenario][1] = told

    def _line(self) -> str:
        return "; ".join(f"{name}, now {told}" if told else name for name, told in self._told)


def progress_text(seeds: Mapping[int, SimulationProgress], seconds: float) -> str:
    """Says how far seeds have come, `seconds` after the begin."""
    simulated = sum(one.at_s for one in seeds.values())
    newest = max(seeds.values(), key=lambda one: one.at_s)
    until = f" of {clock(newest.until_s)}" if newest.until_s else ""
    steps = f" of {newest.of_steps:,}" if newest.of_steps else ""
    speed = f", {simulated / seconds:,.0f} times real time" if seconds > 0 else ""
    return f"{clock(newest.at_s)}{until}, {newest.steps:,}{steps} steps{speed}"
