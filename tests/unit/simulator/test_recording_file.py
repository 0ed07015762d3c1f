"""A recorded run's file: read back as written, small, and refused with its line where anything is wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ebbtide.checked_files import FileRefused
from ebbtide.simulator.recording.recorded_run import read_record, write_record
from ebbtide.simulator.recording.run_recorder import record_run
from tests.fakes.run_histories import history


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_record(record_run(*history()), tmp_path / "run.json")
    return tmp_path / "run.json"


def test_a_record_is_read_back_as_it_was_written(file: Path) -> None:
    assert read_record(file) == record_run(*history())
    before = file.read_bytes()
    write_record(read_record(file), file)
    assert file.read_bytes() == before


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda one: one.update(format=2), "format: invalid enum value 2"),
        (lambda one: one.update(more=1), "more: unknown key"),
        (lambda one: one.pop("spec"), "spec: is required"),
        (lambda one: one["spec"].update(group_size=0), "spec.group_size: expected `int` >= 1"),
        (lambda one: one["rollouts"]["length"].append(5), "rollouts.length: has 9 rows, and rollouts.step has 8"),
        (lambda one: one["rollouts"]["length"].__setitem__(2, -1), "rollouts.length[2]: expected `int` >= 0"),
        (lambda one: one["rollouts"]["length"].__setitem__(2, 1 << 40), "expected `int` <= 16777216"),
        (lambda one: one["rollouts"]["end_s"].__setitem__(1, 0.5), "rollouts.end_s[1]: must not be before begin_s"),
        (lambda one: one["rollouts"]["group"].__setitem__(0, 3), "rollouts.group: must count from 0"),
        (lambda one: one["rollouts"].update({name: [] for name in one["rollouts"]}), "rollouts: must have a row"),
        (lambda one: one.update(workers=[]), "workers: must name a worker"),
        (lambda one: one["workers"].append(one["workers"][0]), "workers: must not name a worker twice"),
        (lambda one: one["workers"][0].update(present=[[5.0, 4.0]]), "workers[0].present[0]: must not end before"),
        (lambda one: one["workers"][0].update(present=[[0.0, None], [3.0, None]]), "present[1]: must begin after"),
        (lambda one: one["workers"][0].update(worker="a b"), "expected `str` matching regex"),
        (lambda one: one["steps"][0].update(announced_s=1.0), "steps[0].announced_s: must not be before opened_s"),
        (lambda one: one["spec"].update(groups_per_step=100_000, group_size=4096), "groups_per_step: a step has 4096"),
        (lambda one: one["steps"][0].update(step=9), "steps[0].step: must be a step of rollouts.step"),
        (lambda one: one["engine"].update(base_s=0, rollout_s=0), "engine.base_s: a token must take time"),
    ],
)
def test_a_file_that_was_tampered_with_is_refused_by_its_field_and_line(file: Path, change: Change, said: str) -> None:
    found = json.loads(file.read_text())
    change(found)
    file.write_text(
        "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in found.items()) + "}"
    )
    with pytest.raises(FileRefused) as refusal:
        read_record(file)
    assert said in str(refusal.value)
    (problem,) = refusal.value.problems
    assert str(refusal.value).startswith(f"{file}:{problem.line}: ")
    assert "record the run again" in problem.text
    outermost = problem.field.partition(".")[0].partition("[")[0]
    assert problem.line == 1 or f'"{outermost}"' in file.read_text().splitlines()[problem.line - 1]


@pytest.mark.parametrize("data", [b"", b"{", b"[" * 100_000, b"\xff\xfe{}", b"null", b'{"format": 1e999}', b"\x00"])
def test_what_is_no_record_at_all_is_refused_in_one_line(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "run.json").write_bytes(data)
    with pytest.raises(FileRefused) as refusal:
        read_record(tmp_path / "run.json")
    assert len(str(refusal.value).splitlines()) == 1


def test_hundreds_of_damaged_files_are_refused_or_are_records(file: Path) -> None:
    random, good = Random("damaged records"), file.read_bytes()
    refusals = []
    for _ in range(300):
        data = bytearray(good)
        for _ in range(random.randrange(1, 4)):
            at = random.randrange(len(data))
            data[at : at + random.randrange(3)] = random.choice([b"", b"-", b"9" * 20, b"null", b"}", b'"', b"\x80"])
        file.write_bytes(data)
        try:
            read_record(file)
        except FileRefused as refusal:
            refusals.append(str(refusal))
    assert len(refusals) > 200
    assert all(text.startswith(f"{file}:") for text in refusals)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileRefused, match=r"none\.json.*cannot be read"):
        read_record(tmp_path / "none.json")
