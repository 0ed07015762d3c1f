"""Runs `ebbtide simulate` and `ebbtide run record`, and shows what they found."""

import importlib.util
import os
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn
from rich.table import Table

from ebbtide.cli.views.tables import amount, cell, clock, data_table, plain, print_wide
from ebbtide.cli.views.timeline import fetch_events
from ebbtide.cli.waiting import Waiting
from ebbtide.errors import EbbtideError, InvalidRequest
from ebbtide.simulator.engines.roofline import GPUS, MODELS, DeviceSheet, ModelShape, kv_room
from ebbtide.simulator.outcome import Outcome, SimulationProgress
from ebbtide.simulator.recording.recorded_run import RecordedRun, WeightSizes, write_record
from ebbtide.simulator.recording.run_recorder import record_run
from ebbtide.simulator.scenario.scenario_reader import example_files
from ebbtide.simulator.scenario_figures import (
    Figures,
    ScenarioFigures,
    SeedSpread,
    figures,
    figures_file,
    quantile,
    ratios,
)
from ebbtide.simulator.seed_processes import Simulate, simulate_seeds
from ebbtide.simulator.simulate import SeedTask, scenario_name, simulate_task

if TYPE_CHECKING:
    from ebbtide.client import Client


def model_table() -> Table:
    """Tabulates the models, and the fewest GPUs of a host on which an engine has room for them."""
    table = data_table(("model", "GB", *(f"fewest {gpu.name}" for gpu in GPUS)), left={"model"})
    for model in MODELS:
        fewest = (_fewest_gpus(model, gpu) for gpu in GPUS)
        table.add_row(*map(cell, (model.name, f"{model.bytes / 1e9:.0f}", *fewest)))
    return table


def _fewest_gpus(model: ModelShape, gpu: DeviceSheet) -> str:
    return next((str(gpus) for gpus in (1, 2, 4, 8) if kv_room(model, gpu, gpus) > 0), "-")


def example_table() -> Table:
    """Tabulates the example scenarios: their files, and what each asks."""
    table = data_table(("example", "question"), left={"example", "question"})
    for path in example_files():
        table.add_row(cell(str(path)), cell(_question(path)))
    return table


def _question(path: Path) -> str:
    """The comment with which an example begins, up to its question mark; else its name."""
    asked, mark, _ = " ".join(_opening_comment(path.read_text())).partition("?")
    return f"{asked}{mark}" or str(tomllib.loads(path.read_text()).get("name", ""))


def _opening_comment(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if not line.startswith("# "):
            return
        yield line.removeprefix("# ").strip()


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
    _Row("tokens_twice", "tokens regenerated", _count),
    _Row("twice_share", "  of all tokens", _share),
    _Row("tokens_moved", "tokens moved", _count),
    _Row("tokens_reread", "tokens re-prefilled", _count),
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
        for number, shown in enumerate(found):
            cells.append(_text(shown.get(row.name), row.text))
            if number:
                cells.append(_ratio(found[0], shown, row.name))
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


async def fetch_recording(client: "Client", run_id: str) -> RecordedRun:
    """Records the run up to now. Raises `NotFound`, and `NotReady` while no step of it is over."""
    spans = [span async for span in client.timeline(run_id)]
    events = await fetch_events(client, run_id)
    recorded = record_run(await client.run(run_id), spans, events, await client.workers())
    return recorded if recorded.weights.dense else replace(recorded, weights=await _sizes(client, run_id))


async def _sizes(client: "Client", run_id: str) -> WeightSizes:
    """Bytes of a version as the relay has them; 0 if it cannot be asked."""
    try:
        state = await client.describe_weights(run_id)
    except EbbtideError:
        return WeightSizes()
    dense = [one.info.size for one in state.versions]
    sent = [min([patch.size for patch in one.patches if patch.size] or [one.info.size]) for one in state.versions]
    return WeightSizes(dense=round(quantile(dense, 0.5) or 0), sent=round(quantile(sent, 0.5) or 0))


def write_recording(recorded: RecordedRun, file: Path) -> str:
    """Writes the file, and returns what a person is told of it. Raises `InvalidRequest`."""
    try:
        write_record(recorded, file)
    except OSError as error:
        raise InvalidRequest(f"{str(file)!r} cannot be written ({error.strerror})", field="FILE") from None
    rollouts, steps = recorded.rollouts, len(set(recorded.rollouts.step))
    told = f"{file}: {len(rollouts.step):,} rollouts of {steps:,} steps, on {len(recorded.workers):,} workers"
    left_out = recorded.left_out
    parts = {
        "of evaluation": left_out.evaluation,
        "unfinished": left_out.unfinished,
        "of steps that are not whole": left_out.of_partial_steps,
    }
    missing = ", ".join(f"{count:,} {name}" for name, count in parts.items() if count)
    told += f"; left out: {missing}" if missing else ""
    return told if recorded.weights.dense else f"{told}; sizes of versions are unknown: name their --relay"


INTERRUPTED: Final = 130


class SimulateOptions(Struct, frozen=True, kw_only=True):
    scenario: Path | None = None
    compare: tuple[Path, ...] = ()
    recording: Path | None = None  # without a scenario its own fleet comes first
    seed: int = 0
    seeds: int = 1
    jobs: int | None = None  # None: one per core
    json: Path | None = None
    png: Path | None = None

    def tasks(self) -> list[list[SeedTask]]:
        """The tasks of each fleet, one for each seed. Raises `InvalidRequest` if no fleet is named."""
        if self.scenario is None and self.recording is None:
            raise InvalidRequest("name a scenario file, or a recorded run with --from", field="SCENARIO.toml")
        first = "" if self.scenario is None else str(self.scenario)
        return [
            [self._task(fleet, seed) for seed in range(self.seed, self.seed + self.seeds)]
            for fleet in (first, *map(str, self.compare))
        ]

    def _task(self, fleet: str, seed: int) -> SeedTask:
        drawn = self.png is not None and seed == self.seed
        return SeedTask(scenario=fleet, recording=str(self.recording or ""), seed=seed, spans=drawn)


def run(
    options: SimulateOptions,
    *,
    simulate: Simulate = simulate_task,
    name_of: Callable[[SeedTask], str] = scenario_name,
) -> int:
    """Returns the exit status. Raises `InvalidRequest` for faulty input, before anything is simulated.

    `simulate` simulates a seed; `name_of` reads a task's scenario and returns its name.
    """
    tasks = options.tasks()
    _need_installed("redis", "ebbtide simulate")
    if options.png is not None:
        _need_installed("matplotlib", "--png")
    names = [name_of(of_fleet[0]) for of_fleet in tasks]
    for path, field in ((options.json, "--json"), (options.png, "--png")):
        if path is not None:
            _check_writable(path, field)
    try:
        outcomes = _simulate(tasks, names, options.jobs or len(os.sched_getaffinity(0)), simulate)
    except KeyboardInterrupt:
        print("Interrupted; nothing was written.", file=sys.stderr)  # noqa: T201 - a command
        return INTERRUPTED
    print_simulation([figures(of_fleet) for of_fleet in outcomes])
    _write(options, outcomes)
    return 0


def _simulate(
    tasks: Sequence[Sequence[SeedTask]], names: Sequence[str], jobs: int, simulate: Simulate
) -> list[list[Outcome]]:
    """The outcomes of each fleet, in the order of its seeds."""
    flat = [(fleet, task) for fleet, of_fleet in enumerate(tasks) for task in of_fleet]
    heard: list[dict[int, SimulationProgress]] = [{} for _ in tasks]
    with SimulationScreen(names) as screen:

        def say(number: int, progress: SimulationProgress) -> None:
            fleet, task = flat[number]
            heard[fleet][task.seed] = progress
            screen.show(fleet, heard[fleet], of=len(tasks[fleet]))

        outcomes = simulate_seeds([task for _, task in flat], jobs=jobs, say=say, simulate=simulate)
    found: list[list[Outcome]] = [[] for _ in tasks]
    for (fleet, _), outcome in zip(flat, outcomes, strict=True):
        found[fleet].append(outcome)
    return found


def _write(options: SimulateOptions, outcomes: Sequence[Sequence[Outcome]]) -> None:
    """Writes what was asked for. The picture shows each scenario with its first seed."""
    if options.json is not None:
        with _named(options.json):
            options.json.write_bytes(figures_file(outcomes))
    if options.png is not None:
        from ebbtide.simulator.outcome_picture import write_outcome_picture

        with _named(options.png):
            write_outcome_picture([of_fleet[0] for of_fleet in outcomes], options.png)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Names the file that cannot be written. A full disk's error does not."""
    try:
        yield
    except OSError as error:
        told = f"cannot be written ({error.strerror}); name another file, or make room"
        raise InvalidRequest(told, field=str(path)) from None


def _need_installed(module: str, what: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise EbbtideError(f"{what} needs {module}, which is not installed: install ebbtide[simulate]")


def _check_writable(path: Path, field: str) -> None:
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InvalidRequest(f"{str(path)!r} cannot be written; name a file in a folder that is there", field=field)
