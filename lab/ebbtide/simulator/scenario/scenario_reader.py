"""Reads a scenario with all files that it names, or refuses it by file, line, field and remedy."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from ebbtide.checked_files import FileRefused, TomlPath, UnreadableFile, checked
from ebbtide.simulator.scenario.input_tables import (
    InputTables,
    SpotTrace,
    read_grants,
    read_prices,
    read_quantiles,
    read_spot_trace,
)
from ebbtide.simulator.scenario.machine_pool import SpotTraceSpec
from ebbtide.simulator.scenario.quantity_spec import QuantitySpec
from ebbtide.simulator.scenario.scenario import Scenario, ScenarioSpec
from ebbtide.simulator.scenario.scenario_checks import KnownNames, check_engines, check_names
from ebbtide.simulator.scenario.scenario_source import ScenarioSource
from ebbtide.simulator.scenario.training_run import TrainingRun
from ebbtide.simulator.scenario.workload import curve, mean_of

T = TypeVar("T")
#: Arrivals and losses that a repeated trace may make.
_MOST_CHANGES: Final = 2_000_000


def read_tables(spec: ScenarioSpec, source: ScenarioSource) -> InputTables:
    """Read the files, each once, and note their problems and those of windows that are cut out of them."""
    tables = InputTables()
    for index, pool in enumerate(spec.fleet):
        at: TomlPath = ("fleet", index)
        if pool.prices is not None:
            _add(tables.prices, pool.prices, read_prices, (*at, "prices"), source)
        if pool.trace is not None:
            _add(tables.spots, pool.trace.file, read_spot_trace, (*at, "trace", "file"), source)
            _check_window((*at, "trace"), pool.trace, tables, source)
            _check_laps((*at, "trace"), pool.trace, tables, spec.until_s, source)
        if pool.grants is not None:
            _add(tables.grants, pool.grants.file, read_grants, (*at, "grants", "file"), source)
            tape = tables.grants.get(pool.grants.file)
            if tape is not None and len(tape.shares) * spec.until_s / tape.end_s > _MOST_CHANGES:
                told = f"the tape of {tape.end_s:.4g} s begins again too often; give a longer one, or fewer hours"
                source.note((*at, "grants", "file"), told)
    for index, run in enumerate(spec.run):
        for path, quantity, _ in _quantities(run):
            if quantity.file is not None:
                _add(tables.quantiles, quantity.file, read_quantiles, ("run", index, *path, "file"), source)
    return tables


def check_means(spec: ScenarioSpec, tables: InputTables, source: ScenarioSource) -> None:
    """Note means that no multiple of the values has, such as one of values that are mostly 0."""
    for index, run in enumerate(spec.run):
        for path, quantity, most in _quantities(run):
            if quantity.mean is not None:
                found = mean_of(curve(quantity, tables.quantiles, most))
                if abs(found - quantity.mean) > 0.01 * quantity.mean:
                    told = f"no multiple of the values has this mean; the nearest is {found:.4g}"
                    source.note(("run", index, *path, "mean"), told)


def _quantities(run: TrainingRun) -> Iterator[tuple[TomlPath, QuantitySpec, float | None]]:
    """All quantities of a run, and the bound that the run sets them."""
    yield ("prompt_tokens",), run.prompt_tokens, run.context - 1
    yield ("lengths",), run.lengths, run.cap
    for name in run.environment.__struct_fields__:
        yield ("environment", name), getattr(run.environment, name), None


def _add(
    tables: dict[str, T], file: str, read: Callable[[Path, str], T], path: TomlPath, source: ScenarioSource
) -> None:
    if file in tables:
        return
    try:
        tables[file] = read(source.folder / file, source.shown(file))
    except UnreadableFile as error:
        source.note(path, f"{file!r} {'; '.join(problem.text for problem in error.problems)}")
    except FileRefused as error:
        source.add(*error.problems)


def _check_window(path: TomlPath, spec: SpotTraceSpec, tables: InputTables, source: ScenarioSource) -> None:
    if (trace := tables.spots.get(spec.file)) is None:
        return
    end_s = spec.start_s + spec.span_s if spec.span_s else trace.end_s
    if spec.start_s > trace.end_s:
        source.note((*path, "start_s"), f"must be at most {trace.end_s:.12g}, the trace's end")
    elif not _anybody(trace, spec.start_s, end_s):
        told = f"no machine is there from {spec.start_s:.12g} to {end_s:.12g} s of the trace; choose another window"
        source.note((*path, "start_s"), told)


def _check_laps(
    path: TomlPath, spec: SpotTraceSpec, tables: InputTables, until_s: float, source: ScenarioSource
) -> None:
    if not spec.repeats or (trace := tables.spots.get(spec.file)) is None:
        return
    span_s = (spec.span_s or trace.end_s - spec.start_s) * spec.time_scale
    rows = len(trace.events) or sum(abs(after - before) for (_, before), (_, after) in pairwise(trace.counts))
    if span_s <= 0:
        source.note((*path, "repeats"), "the window has no length, so it cannot begin again; state span_s")
    elif (rows + 1) * until_s / span_s > _MOST_CHANGES:
        told = f"the window begins again {until_s / span_s:.0f} times; state a longer span_s, or fewer hours"
        source.note((*path, "repeats"), told)


def _anybody(trace: SpotTrace, start_s: float, end_s: float) -> bool:
    """Whether a machine is there at some moment of the window."""
    there = 0
    changes = [(one.at_s, there := there + (1 if one.joins else -1)) for one in trace.events] or trace.counts
    before = [number for at_s, number in changes if at_s <= start_s]
    return bool(before and before[-1]) or any(number for at_s, number in changes if start_s < at_s <= end_s)


_ANY: Final = KnownNames()


def read_scenario(path: Path, known: KnownNames = _ANY) -> Scenario:
    """Read a scenario file. Raises `FileRefused` with file, line, column, field and remedy of each problem."""
    return _build(ScenarioSource(path), known)


def parse_scenario(text: str, path: Path, known: KnownNames = _ANY) -> Scenario:
    """Read a scenario from a text, as if it stood in the file `path`. Raises `FileRefused`."""
    return _build(ScenarioSource(path, text=text), known)


def _build(source: ScenarioSource, known: KnownNames) -> Scenario:
    table = checked(ScenarioSpec, source.table, (), source.note)
    source.refuse_noted()
    spec = msgspec.convert(table, ScenarioSpec)
    check_names(spec, source, known)
    tables = read_tables(spec, source)
    source.refuse_noted()
    check_means(spec, tables, source)
    check_engines(spec, tables, source, known)
    source.refuse_noted()
    parts = {name: getattr(spec, name) for name in spec.__struct_fields__}
    return Scenario(**parts, folder=str(source.folder), tables=tables)


#: In a wheel beside this package; in a working copy where readers look for examples.
_FOLDERS: Final = (Path(__file__).parent / "examples", Path(__file__).parents[4] / "examples" / "scenarios")


def example_files() -> list[Path]:
    """Returns the scenario files, by name; none if they were left out of the installation."""
    folder = next((folder for folder in _FOLDERS if folder.is_dir()), None)
    return sorted(folder.glob("*.toml")) if folder else []
