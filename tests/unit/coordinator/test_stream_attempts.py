"""What an append stream finds in the mirror for the numbers of its deltas."""

from collections.abc import Sequence

import pytest

from ebbtide.append_stream import AppendDelta, AppendReceiver, AppendSender
from ebbtide.coordinator.append_streams import FoundAttempts, StreamAttempts
from ebbtide.coordinator.state.running_attempt import RunningAttempt
from ebbtide.errors import InvalidRequest
from ebbtide.types.fleet import AttemptRef
from ebbtide.types.rollout import FinishReason
from ebbtide.types.tokens import TOKEN_BYTES
from tests.unit.coordinator.model_fleet import ModelFleet


class Stream:
    """A worker's append stream, up to the store."""

    def __init__(self, fleet: ModelFleet) -> None:
        self._fleet, self._sender, self._receiver = fleet, AppendSender(), AppendReceiver()
        self.attempts = StreamAttempts()

    def send(self, refs: Sequence[AttemptRef], *, offset: int = 0, finish: FinishReason | None = None) -> FoundAttempts:
        """Two tokens of each attempt."""
        deltas = [AppendDelta(ref, offset, bytes(2 * TOKEN_BYTES), finish) for ref in refs]
        request = self._sender.request(1, deltas)
        ((places, columns),) = self._receiver.columns(request)
        self.attempts.opened(request)
        return self.attempts.of(self._fleet.state.runs.get(columns.run_id), columns, places)


@pytest.fixture
def fleet() -> ModelFleet:
    return ModelFleet(1)


@pytest.fixture
def stream(fleet: ModelFleet) -> Stream:
    return Stream(fleet)


def begun(fleet: ModelFleet, *names: str) -> list[RunningAttempt]:
    session = next(iter(fleet.state.sessions.values()))
    return [fleet.begin(name, session) for name in names]


def test_attempts_are_found_and_have_begun(fleet: ModelFleet, stream: Stream) -> None:
    a, b = begun(fleet, "a", "b")
    assert stream.send([a.ref, b.ref]) == ([a, b], True)
    assert a.started
    fleet.run.accept_tokens([a, b], [2, 2])
    assert stream.send([b.ref, a.ref], offset=2) == ([b, a], True)


def test_deltas_that_do_not_follow_what_is_stored_are_told(fleet: ModelFleet, stream: Stream) -> None:
    a, b = begun(fleet, "a", "b")
    fleet.run.accept_tokens([a, b], [2, 0])
    assert stream.send([a.ref, b.ref]) == ([a, b], False)


def test_an_attempt_that_is_over_is_not_found_again(fleet: ModelFleet, stream: Stream) -> None:
    (a,) = begun(fleet, "a")
    stream.send([a.ref])
    fleet.run.end("a")
    assert stream.send([a.ref], offset=2) == ([None], False)


def test_another_attempt_at_the_rollout_does_not_take_the_tokens_of_the_former_one(
    fleet: ModelFleet, stream: Stream
) -> None:
    (a,) = begun(fleet, "a")
    stream.send([a.ref])
    fleet.run.end("a")
    (other,) = begun(fleet, "a")
    other.attempt_id = "another"
    assert stream.send([a.ref], offset=2) == ([None], False)


def test_an_orphan_keeps_its_tokens_until_it_is_queued_again(fleet: ModelFleet, stream: Stream) -> None:
    (a,) = begun(fleet, "a")
    stream.send([a.ref])
    a.unassign()
    assert stream.send([a.ref]) == ([a], True)
    fleet.run.put_back(a, a.rollout)
    assert stream.send([a.ref]) == ([None], False)


def test_an_unconfirmed_attempt_is_not_found(fleet: ModelFleet, stream: Stream) -> None:
    a, b = begun(fleet, "a", "b")
    stream.send([a.ref, b.ref])
    fleet.run.unconfirm(a, 1.0, newer=True)
    assert stream.send([a.ref, b.ref]) == ([None, b], False)


def test_a_number_that_is_given_again_stands_for_the_new_attempt(fleet: ModelFleet) -> None:
    a, b = begun(fleet, "a", "b")
    stream, sender = Stream(fleet), AppendSender()
    stream.send([a.ref])
    stream._sender = sender  # it begins anew with its numbers
    assert stream.send([b.ref]) == ([b], True)


def test_more_tokens_than_a_rollout_may_have_are_refused_by_the_delta(fleet: ModelFleet, stream: Stream) -> None:
    a, b = begun(fleet, "a", "b")
    stream.send([a.ref, b.ref])
    fleet.run.accept_tokens([a, b], [8, 8])
    with pytest.raises(InvalidRequest, match="max_tokens") as refused:
        stream.send([b.ref, a.ref], offset=8)
    assert refused.value.field == "deltas[0].tokens"


def test_nothing_is_found_of_a_run_that_is_not_here(fleet: ModelFleet, stream: Stream) -> None:
    (a,) = begun(fleet, "a")
    stream.send([a.ref])
    fleet.state.drop_run(fleet.run)
    assert stream.send([a.ref], offset=2) == ([None], False)


def test_a_stream_keeps_no_attempts_that_are_over(fleet: ModelFleet) -> None:
    stream = Stream(fleet)
    fleet.slots = 1000
    finished, moved = begun(fleet, "finished", "moved")
    stream.send([moved.ref])
    stream.send([finished.ref], finish=FinishReason.STOP)
    fleet.run.end("finished")
    fleet.run.end("moved")
    others = begun(fleet, *(f"x{number}" for number in range(64)))
    stream.send([one.ref for one in others])
    kept = [one for one in stream.attempts._known if one is not None]
    assert set(kept) == set(others)
