"""The cause of an attempt's end has one number everywhere, and no text beside it decides."""

import pytest

from ebbtide.coordinator.state.worker_reports import ReleasedReport
from ebbtide.types.fleet import RELEASE_CAUSES, EndCause
from ebbtide.types.run import AttemptSpan
from ebbtide.v1 import fleet_pb2, runs_pb2, types_pb2
from ebbtide.wire import from_proto


def test_the_wire_has_every_cause_under_the_same_number() -> None:
    wire = {name.removeprefix("END_CAUSE_"): number for name, number in types_pb2.EndCause.items() if number}
    assert {cause.name: int(cause) for cause in EndCause} == {name: int(number) for name, number in wire.items()}


def heard(**said: object) -> ReleasedReport:
    return from_proto(fleet_pb2.Released(**said), ReleasedReport)  # type: ignore[arg-type]


@pytest.mark.parametrize("cause", sorted(RELEASE_CAUSES))
def test_a_hand_back_means_its_cause_whatever_the_text_says(cause: EndCause) -> None:
    assert heard(cause=int(cause), reason="version: of nothing").cause is cause


def test_a_cause_that_is_unknown_or_no_workers_to_say_is_a_failure() -> None:
    for cause in (0, 99, int(EndCause.FINISHED)):
        assert heard(cause=cause, reason="draining").cause is EndCause.FAILED


def test_a_span_with_a_cause_of_a_later_release_has_none_that_decides() -> None:
    fields = {"cursor": "1-0", "rollout_id": "a", "attempt_id": "b", "worker_id": "w", "first": 1, "last": 2}
    message = runs_pb2.AttemptSpan(**fields, begin_s=1.0, end_s=2.0, end="finished", cause=types_pb2.END_CAUSE_MOVED)  # type: ignore[arg-type]
    assert from_proto(message, AttemptSpan).cause is EndCause.MOVED
    message.cause = types_pb2.EndCause.ValueType(99)
    assert from_proto(message, AttemptSpan).cause is EndCause.NOT_STATED
    message.cause = types_pb2.END_CAUSE_FINISHED
    assert from_proto(message, AttemptSpan).finished
