"""Defines what is kept of a live run, and the file that keeps it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from ebbtide.checked_files import FileRefused, Problem, read_text
from ebbtide.errors import InvalidRequest
from ebbtide.simulator.scenario.quantity_spec import MOST_STEP_ROLLOUTS
from ebbtide.types.parse import parse

#: A store keeps 16,384 attempts of a run. Files that were joined by hand may have more.
MOST_ROLLOUTS: Final = 1_000_000
_MOST_WORKERS: Final = 20_000
_MOST_STEPS: Final = 1_000_000

#: 1e8 s are three years.
Second = Annotated[float, Meta(ge=0, le=1e8)]
Count = Annotated[int, Meta(ge=0, le=1 << 40)]
_Tokens = Annotated[int, Meta(ge=0, le=16 << 20)]
_Number = Annotated[int, Meta(ge=0, le=1 << 32)]
_Text = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._-]+$")]
_Rate = Annotated[float, Meta(ge=0, le=1e9)]


class RecordedSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the run asked for."""

    name: _Text
    groups_per_step: Annotated[int, Meta(ge=1, le=100_000)]
    group_size: Annotated[int, Meta(ge=1, le=4096)]
    max_staleness: Annotated[int, Meta(ge=0, le=1000)]
    max_tokens: Annotated[int, Meta(ge=1, le=16 << 20)]
    steps: Annotated[int, Meta(ge=1, le=1 << 31)]


class RolloutColumns(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Finished rollouts of training, a row each: ordered by step, group, episode and turn. Columns are equally long.

    `group` and `episode` are numbers from 0, in the order of their first row.
    """

    step: Annotated[list[_Number], Meta(max_length=MOST_ROLLOUTS)]
    group: Annotated[list[_Number], Meta(max_length=MOST_ROLLOUTS)]
    episode: Annotated[list[_Number], Meta(max_length=MOST_ROLLOUTS)]
    turn: Annotated[list[_Number], Meta(max_length=MOST_ROLLOUTS)]
    prompt: Annotated[list[_Tokens], Meta(max_length=MOST_ROLLOUTS)]
    length: Annotated[list[_Tokens], Meta(max_length=MOST_ROLLOUTS)]  # of the whole response
    attempts: Annotated[list[_Number], Meta(max_length=MOST_ROLLOUTS)]
    begin_s: Annotated[list[Second], Meta(max_length=MOST_ROLLOUTS)]  # of its first attempt that is known
    end_s: Annotated[list[Second], Meta(max_length=MOST_ROLLOUTS)]


class RecordedWorker(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    worker: _Text
    kind: Literal["reserved", "spot", "borrowed", ""] = ""  # "": it was gone when the run was recorded
    slots: Annotated[int, Meta(ge=0, le=1 << 20)] = 0  # 0: not known; then `most_running` is the best guess
    most_running: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    #: When it was attached: (from, until). An end of null is that of the record.
    present: Annotated[list[tuple[Second, Second | None]], Meta(max_length=100_000)] = []
    lost: Count = 0  # ends without a drain
    drained: Count = 0
    tokens: Count = 0  # of attempts on it that are known
    generating_s: Second = 0.0  # at least one attempt ran
    rollout_s: Annotated[float, Meta(ge=0, le=1e12)] = 0.0  # summed over attempts
    speed: _Rate = 1.0  # against `MeasuredEngine`: above 1, it was faster


class MeasuredEngine(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How fast rollouts got tokens: one each `base_s + rollout_s * n` seconds while `n` ran on the worker.

    Fitted to whole attempts by least squares, weighted by their tokens. So it has prefill, flushes and the wait for a
    place in the engine in it. Errors are relative, of single attempts.
    """

    base_s: Second
    rollout_s: Second
    attempts: Count
    error_median: _Rate
    error_p90: _Rate
    error_worst: _Rate


class RecordedStep(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A step that was trained. Phases are 0 where the trainer did not report them."""

    step: _Number
    opened_s: Second  # its rollouts' version was announced
    generated_s: Second  # its last rollout ended
    announced_s: Second  # the version that it led to was announced
    train_s: Second = 0.0
    publish_s: Second = 0.0
    checkpoint_s: Second = 0.0


class RecordedInstall(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker's install of a version."""

    worker: _Text
    version: _Number
    at_s: Second
    pull_s: Second
    pause_s: Second  # generation stood still


class WeightSizes(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bytes of a version, in the median of those that the trainer reported; 0 where it reported none."""

    dense: Count = 0
    sent: Count = 0


class LeftOut(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rollouts of the run that the record does not have."""

    evaluation: Count = 0
    unfinished: Count = 0  # cancelled, or still under way
    of_partial_steps: Count = 0  # their steps were under way, or the store no longer had all of their attempts


class RecordedRun(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run as `ebbtide run record` keeps it."""

    format: Literal[1]
    spec: RecordedSpec
    until_s: Second  # the run's age when it was recorded, or ended
    rollouts: RolloutColumns
    workers: Annotated[list[RecordedWorker], Meta(max_length=_MOST_WORKERS)]
    engine: MeasuredEngine | None  # None: no attempt was long enough to measure it
    steps: Annotated[list[RecordedStep], Meta(max_length=_MOST_STEPS)]
    installs: Annotated[list[RecordedInstall], Meta(max_length=MOST_ROLLOUTS)] = []
    weights: WeightSizes = WeightSizes()
    left_out: LeftOut = LeftOut()


#: A million rollouts take about 60 MB.
_MOST_BYTES: Final = 128 << 20
_REMEDY: Final = "record the run again with `ebbtide run record`"


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
        raise _refused(path, text, error.field, f"{error.text}; {_REMEDY}") from None
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
