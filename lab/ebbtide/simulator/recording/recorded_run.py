"""Defines a recorded run. Times are seconds since the run's submission, lengths are tokens."""

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

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
    """A run as `ebbtide record` keeps it."""

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
