"""What goes into an append stream comes out of it, whatever numbers its attempts get."""

import random

import pytest

from ebbtide.append_stream import MAX_DELTAS, AppendAck, AppendDelta, AppendReceiver, AppendSender, acks
from ebbtide.errors import InvalidRequest
from ebbtide.types.fleet import AppendStatus, AttemptRef
from ebbtide.types.rollout import FinishReason
from ebbtide.types.tokens import TOKEN_BYTES
from ebbtide.v1 import fleet_pb2
from tests.fakes.append_deltas import answer, deltas

STORED, GAP, SUPERSEDED = AppendStatus.STORED, AppendStatus.GAP, AppendStatus.SUPERSEDED


def delta(name: int, offset: int, count: int, finish: FinishReason | None = None) -> AppendDelta:
    ref = AttemptRef(f"run{name % 2}", f"rollout{name}", f"attempt{name}")
    return AppendDelta(ref, offset, bytes([name % 256]) * TOKEN_BYTES * count, finish)


def over_the_wire(message: fleet_pb2.AppendRequest) -> fleet_pb2.AppendRequest:
    return fleet_pb2.AppendRequest.FromString(message.SerializeToString())


@pytest.mark.parametrize("seed", range(10))
def test_deltas_arrive_as_they_were_sent_however_many_attempts_a_stream_sees(seed: int) -> None:
    draw, sender, receiver = random.Random(seed), AppendSender(), AppendReceiver()
    for sequence in range(30):
        names = draw.sample(range(4 * MAX_DELTAS), draw.choice([1, 5, 64, MAX_DELTAS]))
        sent = [
            delta(name, draw.randrange(99), draw.randrange(4), draw.choice([None, FinishReason.LENGTH]))
            for name in names
        ]
        assert deltas(receiver, over_the_wire(sender.request(sequence, sent))) == sent


def test_an_attempt_is_named_once_on_a_stream() -> None:
    sender = AppendSender()
    first, second = (sender.request(number, [delta(1, 8 * number, 8), delta(2, 0, 0)]) for number in range(2))
    assert (len(first.opened), len(second.opened)) == (2, 0)
    assert list(first.numbers) == list(second.numbers)


def test_an_answer_tells_what_differs_and_nothing_else() -> None:
    sent = [delta(1, 0, 8), delta(2, 8, 8, FinishReason.STOP), delta(3, 8, 8), delta(4, 0, 1), delta(5, 0, 4)]
    came = [
        AppendAck("attempt1", STORED, 8, False, 7),
        AppendAck("attempt2", STORED, 16, True, 7),
        AppendAck("attempt3", GAP, 4, False, 7),
        AppendAck("attempt4", SUPERSEDED, 0, False, 7),
        AppendAck("attempt5", STORED, 20, False, 7),
    ]
    response = answer(7, sent, came, durable=True)
    assert [other.index for other in response.others] == [2, 3, 4]
    assert acks(sent, response) == came


def named(run_id: str, rollout_id: str, attempt_id: str) -> fleet_pb2.AttemptRef:
    return fleet_pb2.AttemptRef(run_id=run_id, rollout_id=rollout_id, attempt_id=attempt_id)


@pytest.mark.parametrize(
    ("spoilt", "field"),
    [
        ({"numbers": [0, 0]}, "numbers"),
        ({"counts": [2]}, "tokens"),
        ({"tokens": b"x"}, "tokens"),
        ({"numbers": [9]}, r"deltas\[0\].number"),
        ({"numbers": range(MAX_DELTAS + 1)}, "numbers"),
        ({"opened": [fleet_pb2.Opened(number=MAX_DELTAS)]}, r"opened\[0\].number"),
        ({"opened": [fleet_pb2.Opened(attempt=named("r", "a", "x:7"))]}, r"opened\[0\].attempt.attempt_id"),
        ({"opened": [fleet_pb2.Opened(attempt=named("r", "", "x"))]}, r"opened\[0\].attempt.rollout_id"),
        ({"opened": [fleet_pb2.Opened(attempt=named("}:", "a", "x"))]}, r"opened\[0\].attempt.run_id"),
    ],
)
def test_a_message_that_does_not_add_up_is_refused_by_its_column(spoilt: dict[str, object], field: str) -> None:
    message = AppendSender().request(1, [delta(1, 0, 1)])
    for name in spoilt:
        message.ClearField(name)  # type: ignore[arg-type]
    message.MergeFrom(fleet_pb2.AppendRequest(**spoilt))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=f"^{field}"):
        deltas(AppendReceiver(), message)
