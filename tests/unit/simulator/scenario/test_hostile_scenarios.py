"""Hostile files are refused with file, line and remedy, or are valid to the last draw. None takes long."""

import re
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from time import process_time

from msgspec.structs import replace

from ebbtide.checked_files import MOST_PROBLEMS, FileRefused
from ebbtide.simulator.scenario.machine_events import machine_events
from ebbtide.simulator.scenario.scenario import Scenario
from ebbtide.simulator.scenario.scenario_reader import parse_scenario, read_scenario
from ebbtide.simulator.scenario.workload import Workload
from tests.unit.simulator.scenario.hostile_files import HANDWRITTEN, files
from tests.unit.simulator.scenario.scenario_texts import FULL, TABLES, write_tables

#: CPU time of one refusal.
LONGEST_S = 0.15


def read(text: str, path: Path, *, written: bool) -> Scenario | FileRefused:
    try:
        return read_scenario(path) if written else parse_scenario(text, path)
    except FileRefused as refused:
        return refused


def check_refusal(refused: FileRefused, scenario: str, tables: Mapping[str, str], folder: Path) -> None:
    """Each problem has a file that is there, a line of it (0: all of it), and words."""
    assert 0 < len(refused.problems) <= MOST_PROBLEMS
    for problem in refused.problems:
        lines = re.split("\r\n|\r|\n", tables.get(Path(problem.file).name, scenario))
        assert Path(problem.file).parent == folder
        assert 0 <= problem.line <= len(lines)
        assert problem.line or not problem.column
        assert problem.column <= 1 + max(map(len, lines))
        assert len(problem.text) > 10
        assert len(str(problem)) < 1000
        assert str(problem) in str(refused)


def draw_all(scenario: Scenario) -> None:
    """Draw the first of everything."""
    brief = replace(scenario, hours=min(scenario.hours or 1.0, 1.0))
    work = Workload(brief, 0)
    for run in brief.run:
        for turn in work.turns(run.name, 1, 0, 0):
            assert 0 < turn.response <= run.cap
            assert 0 < turn.prompt < turn.prompt + turn.response <= run.context
            assert turn.wait_s >= 0
    for pool in brief.fleet:
        events = list(islice(machine_events(brief, pool, 0), 1000))
        assert events == sorted(events)
        assert all(0 <= event.at_s < brief.until_s and event.for_s >= 0 for event in events)
        if pool.grants is not None:
            tape = brief.tables.grants[pool.grants.file]
            spells = list(islice(tape.spells(0.3 * tape.end_s), 1000))
            assert all(seconds > 0.0 and 0.0 <= share <= 1.0 for seconds, share in spells)
        assert scenario.price(pool).cost(0.0, brief.until_s) >= 0


def timed(text: str, path: Path, *, written: bool) -> tuple[Scenario | FileRefused, float]:
    """What comes of reading it, and the CPU time; where it took long, the least of several times."""
    if written:
        path.write_text(text, newline="")
    spent: list[float] = []
    while not spent or (min(spent) > LONGEST_S and len(spent) < 5):
        began = process_time()
        found = read(text, path, written=written)
        spent.append(process_time() - began)
    return found, min(spent)


def test_hostile_scenarios_are_refused_by_file_and_line_or_are_truly_valid(tmp_path: Path) -> None:
    path, refused, valid, there = write_tables(tmp_path), 0, 0, TABLES
    for name, text, tables in files():
        for table in tables:
            if tables[table] != there[table]:
                (tmp_path / table).write_text(tables[table], newline="")
        there = tables
        try:
            found, spent_s = timed(text, path, written=name in HANDWRITTEN)
            if isinstance(found, FileRefused):
                check_refusal(found, text, tables, tmp_path)
                refused += 1
                assert spent_s < LONGEST_S
            else:
                draw_all(found)
                valid += 1
        except Exception as error:
            raise AssertionError(
                f"{name}:\n{text[:1500]}\n{tables[name.split()[-1]] if name in tables else ''}"
            ) from error
    assert refused >= 300
    assert valid >= 25


def test_the_good_scenario_that_is_mutated_is_valid(tmp_path: Path) -> None:
    draw_all(parse_scenario(FULL, write_tables(tmp_path)))
