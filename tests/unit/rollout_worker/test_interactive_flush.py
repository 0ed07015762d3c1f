"""Interactive rollouts are sent at once and then every 50 ms; batch rollouts in the same worker notice nothing."""

import math
import random
from collections import defaultdict

import pytest

from ebbtide.append_stream import AppendAck, AppendDelta
from ebbtide.rollout_worker.generation.outbox import MESSAGE_DELTAS, Outbox
from ebbtide.types.fleet import INTERACTIVE_FLUSH_S, FlushPace
from ebbtide.types.rollout import FinishReason
from ebbtide.types.tokens import TOKEN_BYTES
from tests.unit.rollout_worker.test_outbox import GAP, STORED, ref, tokens


@pytest.fixture
def outbox() -> Outbox:
    """An interactive rollout `chat` and a batch rollout `a`, each with one token that was sent by time 4."""
    made = Outbox(flush_tokens=8, flush_interval_s=0.25)
    made.open(ref("chat"), b"", interactive=True)
    made.open(ref("a"), b"")
    made.append("a", tokens(1), 3.0)
    assert len(made.take(3.25).deltas) == 1
    made.append("chat", tokens(1), 4.0)
    assert len(made.take(4.0).deltas) == 1
    assert made.due == math.inf
    return made


def sent(outbox: Outbox, now: float) -> list[str]:
    return [delta.ref.attempt_id for delta in outbox.take(now).deltas]


def test_the_first_token_of_an_attempt_goes_at_once_also_behind_a_partial(outbox: Outbox) -> None:
    outbox.open(ref("b"), tokens(3), interactive=True)
    outbox.append("b", tokens(1, 3), 4.01)
    assert outbox.due == 4.01
    assert outbox.take(4.01).deltas == [AppendDelta(ref("b"), 3, tokens(1, 3), None)]


def test_later_tokens_go_50_ms_after_the_message_before_them(outbox: Outbox) -> None:
    outbox.append("chat", tokens(1, 1), 4.02)
    outbox.append("chat", tokens(1, 2), 4.04)
    assert outbox.due == pytest.approx(4.05)
    assert outbox.take(4.05).deltas == [AppendDelta(ref("chat"), 1, tokens(2, 1), None)]


def test_a_token_that_comes_after_a_pause_goes_at_once(outbox: Outbox) -> None:
    outbox.append("chat", tokens(1, 1), 4.3)
    assert outbox.due == 4.3


def test_a_finish_goes_at_once(outbox: Outbox) -> None:
    outbox.append("chat", tokens(1, 1), 4.01)
    outbox.finish("chat", FinishReason.STOP, 4.01)
    assert outbox.take(4.01).deltas == [AppendDelta(ref("chat"), 1, tokens(1, 1), FinishReason.STOP)]


def test_all_interactive_rollouts_share_a_message(outbox: Outbox) -> None:
    outbox.open(ref("b"), b"", interactive=True)
    outbox.append("chat", tokens(1, 1), 4.01)
    outbox.append("b", tokens(1), 4.02)
    assert sent(outbox, 4.02) == ["chat", "b"]
    outbox.append("chat", tokens(1, 2), 4.03)
    outbox.append("b", tokens(1, 1), 4.06)
    assert outbox.due == pytest.approx(4.07)
    assert sent(outbox, 4.07) == ["chat", "b"]


def test_a_message_for_interactive_rollouts_takes_no_batch_tokens_that_are_not_due(outbox: Outbox) -> None:
    outbox.append("a", tokens(1, 1), 4.0)  # due at 4.25
    outbox.append("chat", tokens(1, 1), 4.24)
    assert sent(outbox, 4.24) == ["chat"]
    outbox.append("chat", tokens(1, 2), 4.245)
    assert outbox.due == pytest.approx(4.25)
    assert sent(outbox, 4.25) == ["chat", "a"], "but interactive tokens go with any message"
    assert outbox.due == math.inf


def test_a_batch_finish_waits_for_others_as_if_there_were_no_interactive_rollout(outbox: Outbox) -> None:
    outbox.finish("a", FinishReason.STOP, 4.5)
    outbox.append("chat", tokens(1, 1), 4.51)
    assert sent(outbox, 4.51) == ["chat"]
    assert outbox.due == pytest.approx(4.52)
    assert sent(outbox, 4.52) == ["a"]


def test_half_a_window_of_interactive_tokens_goes_at_once(outbox: Outbox) -> None:
    outbox.append("chat", tokens(4, 1), 4.01)
    assert outbox.due == 4.01


def test_while_acknowledgements_are_late_only_some_interactive_messages_wait_for_theirs(outbox: Outbox) -> None:
    outbox.lag = 0.4
    outbox.append("chat", tokens(1, 1), 4.01)
    assert outbox.due == pytest.approx(4.1), "a quarter of the lag"


def test_however_late_acknowledgements_are_interactive_tokens_wait_no_longer_than_a_batch_interval(
    outbox: Outbox,
) -> None:
    outbox.lag = 40.0
    outbox.append("chat", tokens(1, 1), 4.01)
    assert outbox.due == pytest.approx(4.25)


def test_a_longer_interval_is_for_interactive_rollouts_alone_and_never_longer_than_that_of_others(
    outbox: Outbox,
) -> None:
    outbox.append("a", tokens(1, 1), 4.01)
    outbox.pace(FlushPace(interactive_s=0.1), 4.02)
    assert outbox.due == pytest.approx(4.26), "the batch rollout is still due when it was"
    outbox.append("chat", tokens(1, 1), 4.03)
    assert outbox.due == pytest.approx(4.1)
    outbox.take(4.1)
    outbox.pace(FlushPace(interactive_s=3.0), 4.11)
    outbox.append("chat", tokens(1, 2), 4.12)
    assert outbox.due == pytest.approx(4.26)
    outbox.drop("a")
    outbox.take(4.26)
    outbox.append("chat", tokens(1, 3), 4.27)
    assert outbox.due == pytest.approx(4.51), "as long as that of batch rollouts"


def test_a_worker_that_flushes_more_often_than_every_50_ms_keeps_its_interval() -> None:
    outbox = Outbox(flush_tokens=99, flush_interval_s=0.02)
    outbox.open(ref("chat"), b"", interactive=True)
    outbox.append("chat", tokens(1), 1.0)
    outbox.take(1.0)
    outbox.append("chat", tokens(1, 1), 1.001)
    assert outbox.due == pytest.approx(1.02)


def test_a_gap_of_an_interactive_rollout_is_filled_at_once_and_brings_nothing_else_forward(outbox: Outbox) -> None:
    outbox.append("a", tokens(1, 1), 4.1)
    outbox.settle([AppendAck("chat", GAP, 0, False)], durable=True, now=4.11)
    assert outbox.take(4.11).deltas == [AppendDelta(ref("chat"), 0, tokens(1), None)]
    assert outbox.due == pytest.approx(4.35)


def test_a_new_stream_sends_what_is_unacknowledged_of_all(outbox: Outbox) -> None:
    outbox.settle([AppendAck("a", STORED, 1, False)], durable=True, now=4.1)
    outbox.rewind(4.2)
    assert outbox.due == 4.2
    chat, batch = outbox.take(4.2).deltas
    assert (chat, batch) == (AppendDelta(ref("chat"), 0, tokens(1), None), AppendDelta(ref("a"), 1, b"", None))


def test_what_a_message_has_no_room_for_is_due_in_the_next(outbox: Outbox) -> None:
    for number in range(MESSAGE_DELTAS):
        outbox.open(ref(f"n{number}"), b"", interactive=True)
        outbox.append(f"n{number}", tokens(1), 5.0)
    outbox.append("chat", tokens(1, 1), 5.0)
    outbox.finish("a", FinishReason.STOP, 4.98)
    assert len(outbox.take(5.0).deltas) == MESSAGE_DELTAS
    assert outbox.due == 5.0
    assert len(outbox.take(5.0).deltas) == 2


class Mixture:
    """Random batch rollouts in a worker, with or without interactive ones: what was sent of each, and when."""

    def __init__(self, seed: int, *, interactive: bool) -> None:
        self._draw, self._other = random.Random(seed), random.Random(-seed)
        jitter = random.Random(seed + 1)
        self._outbox = Outbox(flush_tokens=16, flush_interval_s=0.25, jitter=lambda: jitter.uniform(0.75, 1.0))
        self._interactive, self._made = interactive, defaultdict[str, int](int)
        self.batch: list[tuple[float, AppendDelta]] = []
        self.chats: list[tuple[float, AppendDelta]] = []

    def run(self) -> None:
        now = 0.0
        for number in range(2000):
            self._send_until(now := now + self._draw.uniform(0.0, 0.02))
            self._generate(self._draw, f"b{number // 200}.{self._draw.randrange(3)}", now, interactive=False)
            if self._interactive and self._other.random() < 0.5:
                self._generate(self._other, f"c{number // 300}.{self._other.randrange(2)}", now, interactive=True)

    def _generate(self, draw: random.Random, name: str, now: float, *, interactive: bool) -> None:
        if not self._made[name]:
            self._outbox.open(ref(name), b"", interactive=interactive)
        if self._made[name] < 0:
            return
        count = draw.randrange(1, 4)
        self._outbox.append(name, tokens(count, self._made[name]), now)
        self._made[name] += count
        if draw.random() < 0.02:
            self._outbox.finish(name, FinishReason.STOP, now)
            self._made[name] = -1

    def _send_until(self, now: float) -> None:
        while self._outbox.due <= now:
            at = self._outbox.due
            for delta in self._outbox.take(at).deltas:
                (self.batch if delta.ref.attempt_id.startswith("b") else self.chats).append((at, delta))


@pytest.mark.parametrize("seed", range(20))
def test_batch_rollouts_are_sent_exactly_as_without_interactive_ones(seed: int) -> None:
    alone, mixed = Mixture(seed, interactive=False), Mixture(seed, interactive=True)
    alone.run()
    mixed.run()
    assert mixed.batch == alone.batch
    assert mixed.chats


@pytest.mark.parametrize("seed", range(20))
def test_interactive_tokens_wait_for_50_ms_at_most_and_their_messages_are_no_more_than_that_takes(seed: int) -> None:
    draw = random.Random(seed)
    outbox = Outbox(flush_tokens=64, flush_interval_s=0.25)
    for name in ("chat", "a"):
        outbox.open(ref(name), b"", interactive=name == "chat")
    unsent, went, now = list[float](), list[float](), 0.0
    made = dict.fromkeys(("chat", "a"), 0)
    for _ in range(3000):
        end = now + draw.uniform(0.0, 0.02)
        while outbox.due <= end:
            now = max(now, outbox.due)
            for delta in outbox.take(now).deltas:
                if delta.ref.attempt_id == "chat":
                    assert now - unsent[0] <= INTERACTIVE_FLUSH_S + 1e-9
                    del unsent[: len(delta.tokens) // TOKEN_BYTES]
                    went.append(now)
        name, now = draw.choice(("chat", "a")), end
        outbox.append(name, tokens(1, made[name]), now)
        made[name] += 1
        unsent += [now] if name == "chat" else []
    batch_messages = now / 0.2
    assert len(went) <= now / INTERACTIVE_FLUSH_S + batch_messages + 1
