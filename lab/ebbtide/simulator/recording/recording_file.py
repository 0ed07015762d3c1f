"""Writes recorded runs, and reads them as what they are: files from anywhere."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from ebbtide.checked_files.refusals import FileRefused, Problem
from ebbtide.checked_files.text_files import read_text
from ebbtide.errors import InvalidRequest
from ebbtide.simulator.recording.recorded_run import MeasuredEngine, RecordedRun, RecordedSpec, RolloutColumns
from ebbtide.simulator.scenario.bounds import MOST_STEP_ROLLOUTS
from ebbtide.types.parse import parse

#: A million rollouts take about 60 MB.
_MOST_BYTES: Final = 128 << 20
_REMEDY: Final = "record the run again with `ebbtide record`"


def write_record(recorded: RecordedRun, path: Path) -> None:
    """Writes a record as JSON, with a line for each of its parts. Raises `OSError`."""
    parts = msgspec.to_builtins(recorded)
    lines = [f"{_text(name)}: {_text(value)}" for name, value in parts.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def read_record(path: Path) -> RecordedRun:
    """Reads a record. Raises `FileRefused` naming the file, the line and the field."""
    text = read_text(path, str(path), most_bytes=_MOST_BYTES)
    try:
        found = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise _refused(path, text, "", f"is no JSON ({error}); {_REMEDY}") from None
    except RecursionError:
        raise _refused(path, text, "", f"is nested too deeply; {_REMEDY}") from None
    try:
        recorded = parse(RecordedRun, found)
        _check(recorded)
    except InvalidRequest as error:
        told = str(error).removeprefix(f"{error.field}: ")
        raise _refused(path, text, error.field, f"{told}; {_REMEDY}") from None
    return recorded


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _refused(path: Path, text: str, field: str, told: str) -> FileRefused:
    """The refusal with the line on which a field's outermost part stands."""
    outermost = field.partition(".")[0].partition("[")[0]
    at = text.find(f'"{outermost}"') if outermost else 0
    return FileRefused([Problem(str(path), text.count("\n", 0, max(at, 0)) + 1, 0, field, told)])


def _check(recorded: RecordedRun) -> None:
    """Refuses what the bounds of single fields let pass. Raises `InvalidRequest` naming the field."""
    _check_size(recorded.spec)
    _check_columns(recorded.rollouts)
    for index, worker in enumerate(recorded.workers):
        _check_presence(worker.present, f"workers[{index}].present")
    _need(bool(recorded.workers), "workers", "must name a worker")
    names = [worker.worker for worker in recorded.workers]
    _need(len(set(names)) == len(names), "workers", "must not name a worker twice")
    _check_pace(recorded.engine)
    steps = set(recorded.rollouts.step)
    for index, step in enumerate(recorded.steps):
        _need(step.step in steps, f"steps[{index}].step", "must be a step of rollouts.step")
        _need(step.opened_s <= step.announced_s, f"steps[{index}].announced_s", "must not be before opened_s")


def _check_size(spec: RecordedSpec) -> None:
    rollouts = spec.groups_per_step * spec.group_size
    told = f"a step has {rollouts} rollouts; groups_per_step * group_size must be at most {MOST_STEP_ROLLOUTS}"
    _need(rollouts <= MOST_STEP_ROLLOUTS, "spec.groups_per_step", told)


def _check_pace(engine: MeasuredEngine | None) -> None:
    if engine is not None:
        told = "a token must take time: base_s and rollout_s must not both be 0"
        _need(engine.base_s + engine.rollout_s > 0, "engine.base_s", told)


def _check_presence(spells: Sequence[tuple[float, float | None]], field: str) -> None:
    """Refuses spells that overlap, end before their begin, or go on before the last."""
    free_s: float | None = 0.0
    for index, (begin_s, until_s) in enumerate(spells):
        _need(
            free_s is not None and begin_s >= free_s, f"{field}[{index}]", "must begin after the end of the one before"
        )
        _need(until_s is None or until_s >= begin_s, f"{field}[{index}]", "must not end before its begin")
        free_s = until_s


def _check_columns(columns: RolloutColumns) -> None:
    sizes = {name: len(getattr(columns, name)) for name in columns.__struct_fields__}
    for name, size in sizes.items():
        _need(size == sizes["step"], f"rollouts.{name}", f"has {size} rows, and rollouts.step has {sizes['step']}")
    _need(bool(columns.step), "rollouts", "must have a row")
    for name in ("group", "episode"):
        _need(_dense(getattr(columns, name)), f"rollouts.{name}", "must count from 0 in the order of its first rows")
    for index, (begin_s, end_s) in enumerate(zip(columns.begin_s, columns.end_s, strict=True)):
        _need(begin_s <= end_s, f"rollouts.end_s[{index}]", "must not be before begin_s")


def _dense(numbers: list[int]) -> bool:
    newest = -1
    for number in numbers:
        if number > newest + 1:
            return False
        newest = max(newest, number)
    return True


def _need(fine: bool, field: str, told: str) -> None:
    if not fine:
        raise InvalidRequest(told, field=field)
