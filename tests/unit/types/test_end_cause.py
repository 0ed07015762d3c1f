"""The cause of an attempt's end has one number everywhere, and texts of the former release still name it."""

import pytest

from ebbtide.coordinator.state.worker_reports import ReleasedReport
from ebbtide.types.end_cause import HAND_BACKS, EndCause, cause_of
from ebbtide.types.run import AttemptSpan
from ebbtide.v1 import fleet_pb2, runs_pb2, types_pb2
from ebbtide.wire.record_conversion import from_proto


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", EndCause.UNSAID),
        ("draining", EndCause.WORKER_LEAVES),
        ("drained", EndCause.WORKER_LEAVES),
        ("Drain: SIGTERM", EndCause.WORKER_LEAVES),
        ("preempted", EndCause.WORKER_LEAVES),
        ("reclaimed by the guard", EndCause.WORKER_LEAVES),
        ("shutdown", EndCause.WORKER_LEAVES),
        ("version: 3 is installed", EndCause.WRONG_VERSION),
        ("moved", EndCause.MOVED),
        ("moved: its worker goes over to another run", EndCause.MOVED),
        ("moved to w2", EndCause.MOVED),
        ("stopped: the engine died", EndCause.FAILED),
        ("sampling.top_p: must be above 0", EndCause.FAILED),
        ("finished", EndCause.FINISHED),
        ("cancelled", EndCause.CANCELLED),
        ("run ended", EndCause.RUN_ENDED),
        ("worker lost: its stream broke", EndCause.WORKER_LOST),
        ("its worker did not come back to the restarted coordinator", EndCause.NOT_HELD),
        ("its worker left as the rollout was given to it", EndCause.NOT_HELD),
        ("the store forgot how it went on, and its worker does not say", EndCause.NOT_HELD),
        ("handed back", EndCause.UNSAID),
    ],
)
def test_each_text_of_the_former_release_names_its_cause(text: str, cause: EndCause) -> None:
    assert cause_of(text) is cause


def test_the_wire_has_every_cause_under_the_same_number() -> None:
    wire = {name.removeprefix("END_CAUSE_"): number for name, number in types_pb2.EndCause.items() if number}
    assert {cause.name: int(cause) for cause in EndCause} == {name: int(number) for name, number in wire.items()}


def heard(**said: object) -> ReleasedReport:
    return from_proto(fleet_pb2.Released(**said), ReleasedReport)  # type: ignore[arg-type]


@pytest.mark.parametrize("cause", sorted(HAND_BACKS))
def test_a_hand_back_means_its_cause_whatever_the_text_says(cause: EndCause) -> None:
    assert heard(cause=int(cause), reason="version: of nothing").cause is cause


def test_a_worker_of_the_former_release_says_its_cause_in_words() -> None:
    assert heard(reason="version: 3 is installed").cause is EndCause.WRONG_VERSION
    assert heard().cause is EndCause.UNSAID


def test_a_cause_that_is_unknown_or_no_workers_to_say_is_read_from_the_words() -> None:
    assert heard(cause=99, reason="draining, in a new way").cause is EndCause.WORKER_LEAVES
    assert heard(cause=99, reason="a new reason").cause is EndCause.FAILED
    assert heard(cause=int(EndCause.FINISHED), reason="finished").cause is EndCause.FAILED


def test_a_span_of_the_former_release_has_a_cause_too() -> None:
    fields = {"cursor": "1-0", "rollout_id": "a", "attempt_id": "b", "worker_id": "w", "first": 1, "last": 2}
    message = runs_pb2.AttemptSpan(**fields, begin_s=1.0, end_s=2.0, end="moved to w2")  # type: ignore[arg-type]
    assert from_proto(message, AttemptSpan).cause is EndCause.MOVED
    message.cause = types_pb2.EndCause.ValueType(99)  # of a later release
    assert from_proto(message, AttemptSpan).cause is EndCause.MOVED
    message.cause = types_pb2.END_CAUSE_FINISHED
    assert from_proto(message, AttemptSpan).finished
