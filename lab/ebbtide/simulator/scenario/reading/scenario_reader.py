"""Reads a scenario and everything that it names, or refuses it with all that is wrong."""

from pathlib import Path
from typing import Final

import msgspec

from ebbtide.checked_files.record_check import checked
from ebbtide.simulator.scenario.reading.cross_checks import check_names
from ebbtide.simulator.scenario.reading.engine_checks import check_engines
from ebbtide.simulator.scenario.reading.known_names import KnownNames
from ebbtide.simulator.scenario.reading.scenario_source import ScenarioSource
from ebbtide.simulator.scenario.reading.table_files import check_means, read_tables
from ebbtide.simulator.scenario.scenario import Scenario, ScenarioSpec

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
