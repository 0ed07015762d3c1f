"""The outbox loses nothing that is not safely stored, and sends it when it is due."""

import math

import pytest

from ebbtide.append_stream import AppendAck, AppendDelta
from ebbtide.rollout_worker.generation.outbox import MESSAGE_DELTAS, MESSAGE_TOKENS, Outbox
from ebbtide.types.fleet import AppendStatus, AttemptRef, FlushPace
from ebbtide.types.rollout import FinishReason
from ebbtide.types.tokens import TOKEN_BYTES

STORED, GAP, SUPERSEDED = AppendStatus.STORED, AppendStatus.GAP, AppendStatus.SUPERSEDED


def ref(name: str) -> AttemptRef:
    return AttemptRef("run", f"rollout-{name}", name)


def tokens(count: int, first: int = 0) -> bytes:
    return b"".join((first + index).to_bytes(TOKEN_BYTES, "little") for index in range(count))


@pytest.fixture
def outbox() -> Outbox:
    made = Outbox(flush_tokens=8, flush_interval_s=0.1)
    made.open(ref("a"), b"")
    return made


def test_nothing_is_due_while_there_is_nothing(outbox: Outbox) -> None:
    assert outbox.due == math.inf
    assert outbox.take(0.0).deltas == []


def begun(outbox: Outbox, *names: str) -> None:
    """Each of these has one token that went out before time 5."""
    for name in names:
        outbox.append(name, tokens(1), 4.0)
    outbox.take(4.5)
    assert outbox.due == math.inf


def test_the_first_token_of_an_attempt_is_due_within_20_ms(outbox: Outbox) -> None:
    outbox.open(ref("b"), tokens(3))  # an attempt that goes on behind a partial
    outbox.append("b", tokens(1, 3), 5.0)
    assert outbox.due == pytest.approx(5.02)


def test_later_tokens_are_due_after_the_interval_and_enough_of_them_at_once(outbox: Outbox) -> None:
    begun(outbox, "a")
    outbox.append("a", tokens(1), 5.0)
    assert outbox.due == pytest.approx(5.1)
    outbox.append("a", tokens(2), 5.05)
    assert outbox.due == pytest.approx(5.1)
    outbox.append("a", tokens(1), 5.06)
    assert outbox.due == 5.06, "half a window is unsent"


def test_what_an_acknowledgement_usually_takes_is_taken_off_the_interval_but_not_more_than_half(outbox: Outbox) -> None:
    begun(outbox, "a")
    outbox.lag = 0.03
    outbox.append("a", tokens(1), 5.0)
    assert outbox.due == pytest.approx(5.07)
    outbox.take(5.07)
    outbox.lag = 3.0
    outbox.append("a", tokens(1), 6.0)
    assert outbox.due == pytest.approx(6.05)


def test_the_interval_counts_from_the_oldest_unsent_token_and_jitter_only_shortens_it() -> None:
    outbox = Outbox(flush_tokens=99, flush_interval_s=0.2, jitter=lambda: 0.75)
    for name in "ab":
        outbox.open(ref(name), b"")
    begun(outbox, "a", "b")
    outbox.append("a", tokens(1), 5.0)
    outbox.append("b", tokens(1), 5.14)
    assert outbox.due == pytest.approx(5.15)
    assert len(outbox.take(5.15).deltas) == 2
    outbox.append("b", tokens(1), 5.2)
    assert outbox.due == pytest.approx(5.35)


def test_a_longer_interval_stretches_the_window_in_proportion_and_0_gives_the_own_one_back(outbox: Outbox) -> None:
    begun(outbox, "a")
    outbox.append("a", tokens(6), 5.0)
    assert outbox.behind == {"a"}
    outbox.pace(FlushPace(0.4), 5.0)
    assert not outbox.behind, "of 32 tokens, 7 are not stored"
    assert outbox.due == 5.0
    outbox.take(5.0)
    outbox.append("a", tokens(6), 6.0)
    assert outbox.due == pytest.approx(6.4), "less than half a window of 32 is unsent"
    outbox.pace(FlushPace(), 6.1)
    assert outbox.due == 6.1, "in the own window it is due"
    assert outbox.behind == {"a"}
    outbox.take(6.1)
    outbox.pace(FlushPace(0.05), 6.2)
    outbox.append("a", tokens(1), 6.2)
    assert outbox.due == pytest.approx(6.3), "never shorter than the own one: 8 tokens or 0.1 s"


def test_what_is_urgent_goes_alone_and_the_rest_stays_due_when_it_was(outbox: Outbox) -> None:
    outbox.open(ref("b"), b"")
    outbox.open(ref("c"), b"")
    begun(outbox, "a", "b")
    outbox.append("a", tokens(2), 5.0)
    outbox.append("b", tokens(3), 5.0)
    outbox.finish("b", FinishReason.STOP, 5.01)
    outbox.append("c", tokens(1), 5.02)
    assert outbox.due == pytest.approx(5.03)
    assert [(delta.ref, delta.finish) for delta in outbox.take(5.03).deltas] == [
        (ref("b"), FinishReason.STOP),
        (ref("c"), None),
    ]
    assert outbox.due == pytest.approx(5.1)
    assert [delta.ref for delta in outbox.take(5.1).deltas] == [ref("a")]


def test_what_is_urgent_and_what_is_due_soon_share_a_message(outbox: Outbox) -> None:
    outbox.open(ref("b"), b"")
    begun(outbox, "a")
    outbox.append("a", tokens(2), 5.0)
    outbox.append("b", tokens(1), 5.07)
    assert len(outbox.take(5.09).deltas) == 2
    assert outbox.due == math.inf


def test_one_message_takes_the_tokens_of_all(outbox: Outbox) -> None:
    outbox.open(ref("b"), tokens(3))
    outbox.append("a", tokens(2), 0.0)
    outbox.append("b", tokens(1, 3), 0.0)
    assert outbox.take(0.1).deltas == [
        AppendDelta(ref("a"), 0, tokens(2), None),
        AppendDelta(ref("b"), 3, tokens(1, 3), None),
    ]
    assert outbox.due == math.inf
    assert outbox.take(0.2).deltas == []


def test_a_finish_goes_with_the_last_tokens_and_soon(outbox: Outbox) -> None:
    outbox.append("a", tokens(2), 1.0)
    outbox.finish("a", FinishReason.STOP, 1.0)
    assert outbox.due == pytest.approx(1.02)
    assert outbox.take(1.02).deltas == [AppendDelta(ref("a"), 0, tokens(2), FinishReason.STOP)]


def test_a_finish_without_tokens_is_sent_too(outbox: Outbox) -> None:
    outbox.open(ref("b"), tokens(4))
    outbox.finish("b", FinishReason.LENGTH, 1.0)
    assert outbox.take(1.1).deltas == [AppendDelta(ref("b"), 4, b"", FinishReason.LENGTH)]


def test_an_attempt_leaves_when_its_finish_is_durable_not_before(outbox: Outbox) -> None:
    outbox.append("a", tokens(2), 1.0)
    outbox.finish("a", FinishReason.STOP, 1.0)
    outbox.take(1.1)
    assert outbox.settle([AppendAck("a", STORED, 2, True)], durable=False, now=1.2) == ([], [])
    assert "a" in outbox
    assert outbox.settle([AppendAck("a", STORED, 2, True)], durable=True, now=1.3) == ([ref("a")], [])
    assert "a" not in outbox


def test_a_gap_is_filled_from_what_the_store_has(outbox: Outbox) -> None:
    outbox.open(ref("b"), tokens(4))
    outbox.append("b", tokens(4, 4), 1.0)
    outbox.take(1.1)
    outbox.settle([AppendAck("b", GAP, 1, False)], durable=True, now=1.2)
    assert outbox.due == 1.2
    assert outbox.unacknowledged == 7, "even what it was given as partial"
    assert outbox.take(1.2).deltas == [AppendDelta(ref("b"), 1, tokens(7, 1), None)]


def test_a_new_stream_sends_again_what_was_not_acknowledged(outbox: Outbox) -> None:
    outbox.append("a", tokens(6), 1.0)
    outbox.take(1.1)
    outbox.settle([AppendAck("a", STORED, 6, False)], durable=True, now=1.2)
    outbox.append("a", tokens(2, 6), 1.3)
    outbox.finish("a", FinishReason.STOP, 1.3)
    assert outbox.take(1.4).deltas == [AppendDelta(ref("a"), 6, tokens(2, 6), FinishReason.STOP)]
    outbox.rewind(2.0)
    assert outbox.due == 2.0
    assert outbox.take(2.0).deltas == [AppendDelta(ref("a"), 6, tokens(2, 6), FinishReason.STOP)]


def test_a_new_stream_asks_whether_the_store_still_has_what_it_had(outbox: Outbox) -> None:
    outbox.append("a", tokens(6), 1.0)
    outbox.take(1.1)
    outbox.settle([AppendAck("a", STORED, 6, False)], durable=True, now=1.2)
    outbox.rewind(2.0)
    assert outbox.take(2.0).deltas == [AppendDelta(ref("a"), 6, b"", None)]
    outbox.settle([AppendAck("a", GAP, 4, False)], durable=True, now=2.1)
    assert outbox.take(2.1).deltas == [AppendDelta(ref("a"), 4, tokens(2, 4), None)]


def test_of_several_refused_messages_in_flight_one_is_enough_to_send_again(outbox: Outbox) -> None:
    sent = []
    for number in range(4):
        outbox.append("a", tokens(8, 8 * number), 1.0 + number)
        sent.append(outbox.take(1.0 + number).number)
    outbox.settle([AppendAck("a", STORED, 8, False, sent[0])], durable=True, now=5.0)
    outbox.settle(
        [AppendAck("a", GAP, 4, False, sent[1])], durable=True, now=5.1
    )  # the store was restarted between the two
    again = outbox.take(5.1)
    assert again.deltas == [AppendDelta(ref("a"), 4, tokens(28, 4), None)]
    for stale in sent[2:]:
        outbox.settle([AppendAck("a", GAP, 4, False, stale)], durable=True, now=5.2)
    assert outbox.due == math.inf
    outbox.settle([AppendAck("a", STORED, 32, False, again.number)], durable=True, now=5.3)
    assert (outbox.unacknowledged, outbox.due) == (0, math.inf)


def test_a_gap_of_what_was_sent_again_is_sent_again_too(outbox: Outbox) -> None:
    outbox.append("a", tokens(8), 1.0)
    first = outbox.take(1.0).number
    outbox.settle([AppendAck("a", GAP, 0, False, first)], durable=True, now=1.1)
    second = outbox.take(1.1).number
    outbox.settle([AppendAck("a", GAP, 0, False, second)], durable=True, now=1.2)
    assert outbox.take(1.2).deltas == [AppendDelta(ref("a"), 0, tokens(8), None)]


def test_what_the_store_turns_out_to_have_is_not_sent_again(outbox: Outbox) -> None:
    outbox.append("a", tokens(8), 1.0)
    outbox.take(1.0)
    outbox.rewind(2.0)  # the answer was lost with the stream
    outbox.settle([AppendAck("a", STORED, 8, False)], durable=True, now=2.1)
    outbox.append("a", tokens(1, 8), 2.2)
    assert outbox.take(2.3).deltas == [AppendDelta(ref("a"), 8, tokens(1, 8), None)]


@pytest.mark.parametrize("ack", [AppendAck("a", SUPERSEDED, 0, False), AppendAck("a", STORED, 3, False)])
def test_a_response_that_somebody_else_went_on_with_is_dropped(outbox: Outbox, ack: AppendAck) -> None:
    outbox.append("a", tokens(2), 1.0)
    outbox.take(1.1)
    assert outbox.settle([ack], durable=True, now=1.2) == ([], [ref("a")])
    assert outbox.unacknowledged == 0


def test_acknowledgements_for_forgotten_attempts_mean_nothing(outbox: Outbox) -> None:
    outbox.append("a", tokens(2), 1.0)
    outbox.drop("a")
    assert outbox.settle([AppendAck("a", STORED, 2, False)], durable=True, now=1.2) == ([], [])
    assert outbox.unacknowledged == 0


def test_an_attempt_is_behind_while_three_quarters_of_a_window_are_unacknowledged(outbox: Outbox) -> None:
    outbox.open(ref("b"), tokens(50))
    for name in "ab":
        outbox.append(name, tokens(5), 1.0)
    assert outbox.behind == set(), "what it was given as partial is stored"
    outbox.append("a", tokens(1), 1.1)
    assert outbox.behind == {"a"}
    outbox.take(1.1)
    outbox.settle([AppendAck("a", STORED, 1, False)], durable=True, now=1.2)
    assert outbox.behind == set()
    outbox.settle([AppendAck("a", AppendStatus.GAP, 0, False)], durable=True, now=1.3)
    assert outbox.behind == {"a"}, "the store forgot"


@pytest.mark.parametrize("step", [1, 4, 9])
def test_the_window_holds_what_an_engine_makes_until_it_stops_however_many_it_makes_at_once(step: int) -> None:
    outbox = Outbox(flush_tokens=32, flush_interval_s=0.1, step_tokens=step)
    outbox.open(ref("a"), b"")
    made, due = 0, False
    while not outbox.behind:
        outbox.append("a", tokens(step, made), 1.0)
        made, due = made + step, due or outbox.due == 1.0
    assert made + step <= 32  # the step that the engine is in
    assert due, "tokens were sent before the engine was held"


@pytest.mark.parametrize(("step", "interval"), [(1, 8), (5, 8), (1, 4)])
def test_the_window_holds_what_an_engine_holds_back_too(step: int, interval: int) -> None:
    """It delivers once it has `interval` tokens, and makes `step` in each step until it has stopped."""
    outbox = Outbox(flush_tokens=32, flush_interval_s=0.1, step_tokens=step, stream_interval=interval)
    outbox.open(ref("a"), b"")
    made = held = 0
    for _ in range(64):
        stopping = bool(outbox.behind)
        made, held = made + step, held + step
        if held >= interval:
            outbox.append("a", tokens(held, made - held), 1.0)
            held = 0
        if stopping:
            break
    assert outbox.behind
    assert made <= 32


def test_while_tokens_may_be_held_back_all_are_due_once_in_an_interval() -> None:
    outbox = Outbox(flush_tokens=32, flush_interval_s=0.1, stream_interval=8)
    outbox.open(ref("a"), b"")
    assert outbox.due == math.inf
    outbox.append("a", tokens(1), 1.0)
    assert outbox.take(outbox.due).deltas, "the first token goes soon"
    for _ in range(3):
        before = outbox.due
        assert not outbox.takes_all(before - 0.01)
        assert outbox.takes_all(before), "nothing is known to be unsent"
        assert not outbox.take(before).deltas
        assert before < outbox.due <= before + 0.1
    outbox.finish("a", FinishReason.STOP, 2.0)
    outbox.take(outbox.due)
    outbox.take(outbox.due)
    assert outbox.due == math.inf


@pytest.mark.parametrize("end", ["finish", "drop", "superseded"])
def test_an_attempt_of_which_no_more_comes_holds_nobody_back(outbox: Outbox, end: str) -> None:
    outbox.append("a", tokens(20), 1.0)
    if end == "finish":
        outbox.finish("a", FinishReason.STOP, 1.0)
    elif end == "drop":
        outbox.drop("a")
    else:
        outbox.settle([AppendAck("a", AppendStatus.SUPERSEDED, 0, False)], durable=True, now=1.2)
    assert outbox.behind == set()


def test_a_rollout_that_the_store_has_forgotten_holds_nobody_back_until_it_is_sent_again(outbox: Outbox) -> None:
    outbox.append("a", tokens(20), 1.0)
    outbox.take(1.0)
    outbox.settle([AppendAck("a", STORED, 0, False)], durable=True, now=1.2)
    assert outbox.behind == set()
    outbox.append("a", tokens(1, 20), 1.3)
    assert outbox.behind == set()
    outbox.rewind(1.4)
    outbox.append("a", tokens(1, 21), 1.5)
    assert outbox.behind == {"a"}


def test_no_message_is_larger_than_messages_may_be(outbox: Outbox) -> None:
    outbox.append("a", bytes(TOKEN_BYTES * (MESSAGE_TOKENS + 5)), 1.0)
    outbox.finish("a", FinishReason.STOP, 1.0)
    (first,) = outbox.take(1.0).deltas
    assert (len(first.tokens), first.finish) == (MESSAGE_TOKENS * TOKEN_BYTES, None)
    assert outbox.due == 1.0
    (second,) = outbox.take(1.0).deltas
    assert (second.offset, len(second.tokens), second.finish) == (MESSAGE_TOKENS, 5 * TOKEN_BYTES, FinishReason.STOP)


def test_no_message_has_more_deltas_than_are_taken(outbox: Outbox) -> None:
    for number in range(MESSAGE_DELTAS + 3):
        outbox.open(ref(f"n{number}"), b"")
        outbox.append(f"n{number}", tokens(1), 1.0)
    assert len(outbox.take(1.1).deltas) == MESSAGE_DELTAS
    assert outbox.due == 1.1
    assert len(outbox.take(1.1).deltas) == 3
