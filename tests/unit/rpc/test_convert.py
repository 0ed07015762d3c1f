"""Every record crosses into its message and back unchanged; what is not fit to be a record is refused by path."""

import inspect
import math
import pkgutil
import time
from enum import Enum
from importlib import import_module
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import pytest
from google.protobuf.message import Message
from msgspec import Meta, Struct

import ebbtide.types
from ebbtide.errors import InvalidRequest
from ebbtide.types.device_turns import DeviceTurn
from ebbtide.types.fleet import (
    AttemptRef,
    BorrowedState,
    DraftingState,
    EndReason,
    EngineInfo,
    FlushPace,
    FlushWindow,
    Worker,
    WorkerKind,
    WorkerState,
)
from ebbtide.types.grants import (
    Borrower,
    BorrowerReport,
    Budget,
    DeviceStatus,
    Forecast,
    Grant,
    GuardStatus,
    Hello,
    Latency,
    LoanState,
    ModelLatency,
    OwnerWish,
)
from ebbtide.types.remaining_work import EnginePace, OpenGroup, RemainingWork
from ebbtide.types.rollout import (
    Episode,
    FinishedRollout,
    FinishReason,
    RolloutKind,
    RolloutRequest,
    SampledResponse,
    SubmitOrder,
    TokenChunk,
    Trajectory,
    TrajectoryOutcome,
)
from ebbtide.types.run import (
    AttemptSpan,
    BatchSpec,
    BorrowSpec,
    EnvironmentSpec,
    EvaluationSpec,
    LeaseRef,
    LongRollout,
    RequestSpec,
    Run,
    RunEvent,
    RunMoves,
    RunOutlook,
    RunShare,
    RunSpec,
    Sampling,
    ShareSpec,
    SharingSpec,
    TailSpec,
    TrainerSpec,
)
from ebbtide.types.session import (
    KeyBalance,
    KeyLimits,
    KeyUsage,
    MeteredKey,
    Session,
    SessionEnd,
    SessionState,
    SessionTurn,
    TurnPage,
    UnverifiedSession,
)
from ebbtide.types.weights import (
    BlobSource,
    FetchPath,
    Holder,
    HolderState,
    LinkState,
    Manifest,
    Patch,
    PatchState,
    PolicyVersion,
    TensorEntry,
    TensorPatch,
    VersionInfo,
    VersionState,
    WeightsState,
)
from ebbtide.v1 import fleet_pb2, grants_pb2, loans_pb2, rollouts_pb2, runs_pb2, sessions_pb2, types_pb2, weights_pb2
from ebbtide.wire import from_proto, to_proto

PAIRS: dict[type[Struct], type[Message]] = {
    AttemptRef: fleet_pb2.AttemptRef,
    EngineInfo: fleet_pb2.EngineInfo,
    FlushPace: fleet_pb2.FlushInterval,
    Worker: fleet_pb2.Worker,
    DraftingState: fleet_pb2.Drafting,
    BorrowedState: fleet_pb2.Borrowed,
    AttemptSpan: runs_pb2.AttemptSpan,
    RolloutRequest: rollouts_pb2.RolloutRequest,
    SubmitOrder: rollouts_pb2.SubmitRequest,
    KeyLimits: rollouts_pb2.KeyLimits,
    MeteredKey: rollouts_pb2.MeteredKey,
    KeyUsage: rollouts_pb2.KeyUsage,
    FinishedRollout: rollouts_pb2.FinishedRollout,
    TokenChunk: rollouts_pb2.TokenChunk,
    SampledResponse: rollouts_pb2.SampledResponse,
    Trajectory: rollouts_pb2.Trajectory,
    Episode: rollouts_pb2.Episode,
    TrajectoryOutcome: rollouts_pb2.TrajectoryOutcome,
    Sampling: types_pb2.Sampling,
    EnvironmentSpec: types_pb2.EnvironmentSpec,
    BatchSpec: types_pb2.BatchSpec,
    TrainerSpec: types_pb2.TrainerSpec,
    EvaluationSpec: types_pb2.EvaluationSpec,
    BorrowSpec: types_pb2.BorrowSpec,
    RunShare: runs_pb2.RunShare,
    RunOutlook: runs_pb2.RunOutlook,
    RunMoves: runs_pb2.RunMoves,
    LongRollout: runs_pb2.RunOutlook.LongRollout,
    ShareSpec: types_pb2.ShareSpec,
    TailSpec: types_pb2.TailSpec,
    RequestSpec: types_pb2.RequestSpec,
    SharingSpec: types_pb2.SharingSpec,
    RunSpec: types_pb2.RunSpec,
    Session: sessions_pb2.Session,
    SessionTurn: sessions_pb2.Turn,
    TurnPage: sessions_pb2.TurnPage,
    UnverifiedSession: sessions_pb2.UnverifiedSession,
    SessionEnd: sessions_pb2.EndSessionRequest,
    Run: runs_pb2.Run,
    RunEvent: runs_pb2.RunEvent,
    LeaseRef: runs_pb2.LeaseRef,
    PolicyVersion: types_pb2.PolicyVersion,
    TensorEntry: weights_pb2.TensorEntry,
    Manifest: weights_pb2.ManifestPart,
    VersionInfo: weights_pb2.VersionInfo,
    TensorPatch: weights_pb2.TensorPatch,
    Holder: weights_pb2.Holder,
    BlobSource: weights_pb2.BlobSource,
    FetchPath: weights_pb2.Way,
    VersionState: weights_pb2.VersionState,
    PatchState: weights_pb2.PatchState,
    HolderState: weights_pb2.HolderState,
    LinkState: weights_pb2.LinkState,
    WeightsState: weights_pb2.DescribeVersionsResponse,
    Hello: grants_pb2.Hello,
    BorrowerReport: grants_pb2.Report,
    Grant: grants_pb2.Grant,
    Forecast: grants_pb2.Forecast,
    Latency: grants_pb2.Latency,
    ModelLatency: grants_pb2.ModelLatency,
    Borrower: grants_pb2.Borrower,
    GuardStatus: grants_pb2.GuardStatus,
    OwnerWish: loans_pb2.OwnerWish,
    LoanState: loans_pb2.LoanState,
    DeviceStatus: loans_pb2.DeviceStatus,
    OpenGroup: runs_pb2.OpenGroup,
    RemainingWork: runs_pb2.RemainingWork,
}
#: Travels in parts that have messages of their own: `ebbtide.weights.manifest_parts`.
IN_PARTS = {Patch}
#: Does not travel: what the guard writes into its page, and what travels in parts: why attempts end, a window, a pace,
#: a device's turn.
LOCAL = {Budget, DeviceTurn, EndReason, EnginePace, FlushWindow, KeyBalance}
each_pair = pytest.mark.parametrize(("record", "message"), PAIRS.items(), ids=lambda kind: kind.__name__)
SPEC = RunSpec(name="n", model="m", environment=EnvironmentSpec(name="e"))


def fill(hint: Any, at_least: int = 0) -> Any:  # noqa: PLR0911 - a value for each kind of type
    """A value of the type that differs from any default."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        bounds = next(arg for arg in args if isinstance(arg, Meta))
        value = fill(args[0], int(bounds.ge or 0))
        if args[0] is float:
            value = min(value, 0.5 * float(bounds.le)) if bounds.le is not None else value
            return max(value, float(bounds.ge)) if bounds.ge is not None else value
        return value
    if NoneType in args:
        return fill(args[0])
    if origin is Literal:
        return args[-1]
    if origin is tuple:
        return (fill(args[0]), fill(args[0]))
    if origin is dict:
        return {"key ü": [1, None, {"deep": 1.5}] if args[1] is Any else fill(args[1])}
    if issubclass(hint, Struct):
        return hint(**{name: fill(of) for name, of in get_type_hints(hint, include_extras=True).items()})
    if issubclass(hint, Enum):
        return list(hint)[-1]
    return {bool: True, int: at_least + 3, float: 0.5, str: "text ü", bytes: b"\x00\xff"}[hint]


def test_every_record_has_its_message() -> None:
    modules = [import_module(f"ebbtide.types.{found.name}") for found in pkgutil.iter_modules(ebbtide.types.__path__)]
    records = {
        kind
        for module in modules
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, Struct) and kind.__module__.startswith("ebbtide.types.")
    }
    assert records == set(PAIRS) | IN_PARTS | LOCAL


@each_pair
def test_every_field_of_a_record_is_in_its_message(record: type[Struct], message: type[Message]) -> None:
    assert set(record.__struct_fields__) <= set(message.DESCRIPTOR.fields_by_name)


@each_pair
def test_a_record_with_every_field_set_crosses_unchanged(record: type[Struct], message: type[Message]) -> None:
    full = fill(record)
    sent = message.FromString(to_proto(full, message).SerializeToString())
    assert from_proto(sent, record) == full


@each_pair
def test_a_record_with_only_what_it_must_have_crosses_unchanged(record: type[Struct], message: type[Message]) -> None:
    hints = get_type_hints(record, include_extras=True)
    least = record(**{info.name: fill(hints[info.name]) for info in msgspec.structs.fields(record) if info.required})
    assert from_proto(message.FromString(to_proto(least, message).SerializeToString()), record) == least


def test_an_absent_message_is_the_default_or_none() -> None:
    sent = to_proto(SPEC, types_pb2.RunSpec)
    for name in ("sampling", "batch", "trainer", "evaluation"):
        sent.ClearField(name)
    assert from_proto(sent, RunSpec) == SPEC
    sent.ClearField("environment")
    with pytest.raises(InvalidRequest, match="environment: is required"):
        from_proto(sent, RunSpec)
    assert from_proto(runs_pb2.Run(run_id="r", spec=to_proto(SPEC, types_pb2.RunSpec)), Run).newest is None


def test_an_enum_of_zero_is_the_default_or_none_or_missing() -> None:
    request = to_proto(fill(RolloutRequest), rollouts_pb2.RolloutRequest)
    request.kind = types_pb2.ROLLOUT_KIND_UNSPECIFIED
    assert from_proto(request, RolloutRequest).kind is RolloutKind.TRAIN
    assert from_proto(rollouts_pb2.TokenChunk(offset=1), TokenChunk).reason is None
    with pytest.raises(InvalidRequest, match="reason: is required"):
        from_proto(rollouts_pb2.FinishedRollout(), FinishedRollout)


def test_an_optional_scalar_tells_zero_from_absent() -> None:
    assert from_proto(types_pb2.Sampling(top_p=1, max_tokens=1, repetition_penalty=1, seed=0), Sampling).seed == 0
    assert from_proto(types_pb2.Sampling(top_p=1, max_tokens=1, repetition_penalty=1), Sampling).seed is None


def spoiled(**changes: Any) -> types_pb2.RunSpec:
    message = to_proto(SPEC, types_pb2.RunSpec)
    for path, value in changes.items():
        *nodes, name = path.split("__")
        target: Any = message
        for node in nodes:
            target = getattr(target, node)
        setattr(target, name, value)
    return message


@pytest.mark.parametrize(
    ("changes", "field", "text"),
    [
        ({"sampling__top_p": 0}, "sampling.top_p", "> 0"),
        ({"sampling__temperature": math.nan}, "sampling.temperature", "finite"),
        ({"trainer__learning_rate": math.inf}, "trainer.learning_rate", "finite"),
        ({"trainer__kl_coefficient": -1.0}, "trainer.kl_coefficient", ">= 0"),
        ({"batch__incomplete_group": "wait"}, "batch.incomplete_group", "wait"),
        ({"batch__group_size": 1}, "batch.group_size", ">= 2"),
        ({"quota_bytes": 0}, "quota_bytes", ">= 1048576"),
        ({"environment__params": "{"}, "environment.params", "JSON object"),
        ({"environment__params": "[1]"}, "environment.params", "JSON object"),
        ({"environment__params": '{"a": NaN}'}, "environment.params", "JSON object"),
    ],
)
def test_a_bad_value_is_refused_by_its_path(changes: dict[str, Any], field: str, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text) as refused:
        from_proto(spoiled(**changes), RunSpec)
    assert refused.value.field == field
    with pytest.raises(InvalidRequest) as below:
        from_proto(spoiled(**changes), RunSpec, field="spec")
    assert below.value.field == f"spec.{field}"
    assert str(below.value).count(field) == 1


def test_a_path_leads_into_lists_and_maps() -> None:
    worker = to_proto(fill(Worker), fleet_pb2.Worker)
    worker.state = 77  # type: ignore[assignment] # a number that the enum does not know
    with pytest.raises(InvalidRequest) as refused:
        from_proto(worker, Worker)
    assert refused.value.field == "state"
    event = runs_pb2.RunEvent(kind="step", values={"loss": math.nan})
    with pytest.raises(InvalidRequest) as refused:
        from_proto(event, RunEvent)
    assert refused.value.field == "values.loss"
    episode = to_proto(fill(Episode), rollouts_pb2.Episode)
    episode.trajectory.metrics["x"] = -math.inf
    with pytest.raises(InvalidRequest) as refused:
        from_proto(episode, Episode)
    assert refused.value.field == "trajectory.metrics.x"


@pytest.mark.parametrize(
    ("record", "message", "field"),
    [
        (TokenChunk(offset=-1, tokens=b""), rollouts_pb2.TokenChunk, "offset"),
        (TokenChunk(offset=1 << 40, tokens=b""), rollouts_pb2.TokenChunk, "offset"),
        (TokenChunk(offset=0, tokens="text"), rollouts_pb2.TokenChunk, "tokens"),  # type: ignore[arg-type]
        (EnvironmentSpec(name="e", params={"a": object()}), types_pb2.EnvironmentSpec, "params"),
        (msgspec.structs.replace(SPEC, sampling=Sampling(top_k=1 << 40)), types_pb2.RunSpec, "sampling.top_k"),
    ],
)
def test_a_record_that_its_message_cannot_hold_is_refused_by_field(
    record: Struct, message: type[Message], field: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        to_proto(record, message)
    assert refused.value.field == field


def test_converting_costs_little() -> None:
    """Thousands of rollouts are submitted in a batch: 5 to 7 us each on the machine that this was written on."""
    request = to_proto(fill(RolloutRequest), rollouts_pb2.RolloutRequest)
    start = time.perf_counter()
    for _ in range(1000):
        from_proto(request, RolloutRequest)
    assert time.perf_counter() - start < 0.2


def test_enums_have_the_same_numbers_on_both_sides() -> None:
    sides = [
        (FinishReason, types_pb2.FinishReason, "FINISH_REASON_"),
        (RolloutKind, types_pb2.RolloutKind, "ROLLOUT_KIND_"),
        (SessionState, sessions_pb2.SessionState, "SESSION_STATE_"),
        (WorkerKind, types_pb2.WorkerKind, "WORKER_KIND_"),
        (WorkerState, types_pb2.WorkerState, "WORKER_STATE_"),
    ]
    for ours, theirs, prefix in sides:
        numbers = {f"{prefix}{item.name}": item.value for item in ours}
        assert {f"{prefix}UNSPECIFIED": 0, **numbers} == dict(theirs.items())


def test_parameters_nested_without_end_are_refused_by_field() -> None:
    deep = "[" * 20_000 + "]" * 20_000
    message = types_pb2.EnvironmentSpec(name="e", params=f'{{"a": {deep}}}')
    with pytest.raises(InvalidRequest, match=r"^spec.params: must be a JSON object"):
        from_proto(message, EnvironmentSpec, field="spec")
