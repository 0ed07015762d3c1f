"""The outbox and a store that breaks, forgets and is late: every response ends whole in it."""

import math
import random

import pytest

from ebbtide.append_stream import AppendAck, AppendDelta
from ebbtide.rollout_worker.generation.outbox import Outbox, OutboxMessage
from ebbtide.types.rollout import FinishReason
from ebbtide.types.tokens import TOKEN_BYTES
from tests.unit.rollout_worker.test_outbox import GAP, STORED, ref, tokens


class FlakyStore:
    """Takes deltas as the real store does, loses messages, acknowledgements and its own tail."""

    def __init__(self, seed: int, stored: bytes) -> None:
        self.draw = random.Random(seed)
        self.stored, self.finished = stored, False

    def often(self, share: float) -> bool:
        return self.draw.random() < share

    def forget(self) -> None:
        if not self.finished:
            self.stored = self.stored[: TOKEN_BYTES * self.draw.randrange(len(self.stored) // TOKEN_BYTES + 1)]

    def take(self, delta: AppendDelta) -> list[AppendAck]:
        if self.often(0.2):
            return []
        length, count = len(self.stored) // TOKEN_BYTES, len(delta.tokens) // TOKEN_BYTES
        gap = delta.offset != length and delta.offset + count > length
        if delta.offset == length:
            self.stored += delta.tokens
        self.finished |= not gap and delta.finish is not None
        ack = AppendAck("a", GAP if gap else STORED, len(self.stored) // TOKEN_BYTES, self.finished)
        return [] if self.often(0.2) else [ack]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_gets_lost_the_store_ends_with_the_whole_response(seed: int) -> None:
    outbox = Outbox(flush_tokens=8, flush_interval_s=0.1)
    outbox.open(ref("a"), tokens(5))
    store, made, now = FlakyStore(seed, tokens(5)), 5, 0.0
    while "a" in outbox:
        now += 0.05
        if made < 200:
            outbox.append("a", tokens(5, made), now)
            made += 5
        if made == 200:
            outbox.finish("a", FinishReason.STOP, now)
        if store.often(0.05):
            store.forget()
        if store.often(0.05) or (made == 200 and outbox.due > now + 1):
            outbox.rewind(now)  # a new stream
        if outbox.due <= now:
            acks = [ack for delta in outbox.take(now).deltas for ack in store.take(delta)]
            outbox.settle(acks, durable=True, now=now)
    assert store.stored == tokens(made)
    assert outbox.unacknowledged == 0


class Pipeline:
    """A stream to a store: messages arrive, and answers come, in order and late. It breaks, and the store forgets."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.stored: dict[str, bytes] = {}
        self.finished: set[str] = set()
        self.coming: list[OutboxMessage] = []
        self.answers: list[list[AppendAck]] = []

    def often(self, share: float) -> bool:
        return self.draw.random() < share

    def send(self, message: OutboxMessage) -> None:
        self.coming.append(message)

    def arrive(self) -> None:
        message = self.coming.pop(0)
        self.answers.append([self.take(delta, message.number) for delta in message.deltas])

    def take(self, delta: AppendDelta, number: int) -> AppendAck:
        name = delta.ref.attempt_id
        kept, count = self.stored.setdefault(name, b""), len(delta.tokens) // TOKEN_BYTES
        length = len(kept) // TOKEN_BYTES
        if delta.offset + count > length and delta.offset != length:
            return AppendAck(name, GAP, length, False, number)
        if delta.offset == length:
            self.stored[name] = kept + delta.tokens
        length = len(self.stored[name]) // TOKEN_BYTES
        if delta.finish is not None and delta.offset + count == length:
            self.finished.add(name)
        return AppendAck(name, STORED, length, name in self.finished, number)

    def forget(self) -> None:
        """A restart that loses the end of everything that is not finished."""
        for name in self.stored.keys() - self.finished:
            keep = self.draw.randrange(len(self.stored[name]) // TOKEN_BYTES + 1)
            self.stored[name] = self.stored[name][: keep * TOKEN_BYTES]

    def break_off(self) -> None:
        """Some of what was on its way arrived, and no answer came back."""
        while self.coming and self.often(0.5):
            self.arrive()
        self.coming.clear()
        self.answers.clear()

    def step(self, outbox: Outbox, now: float) -> None:
        """Something of all this happens, or nothing."""
        if self.often(0.01):
            self.forget()
        if self.often(0.01) or (len(outbox) and not self.coming and outbox.due == math.inf and now > 10):
            self.break_off()
            outbox.rewind(now)
        if outbox.due <= now and len(self.coming) < 8:
            self.send(outbox.take(now))
        if self.coming and self.often(0.3):
            self.arrive()
        if self.answers and self.often(0.3):
            outbox.settle(self.answers.pop(0), durable=True, now=now)


@pytest.mark.parametrize("seed", range(200))
def test_with_many_messages_in_flight_every_response_ends_whole_in_the_store(seed: int) -> None:
    outbox = Outbox(flush_tokens=8, flush_interval_s=0.1, jitter=lambda: 0.9)
    pipeline, now = Pipeline(seed), 0.0
    wanted = {f"n{number}": pipeline.draw.randrange(1, 120) for number in range(4)}
    made = dict.fromkeys(wanted, 0)
    for name in wanted:
        outbox.open(ref(name), b"")
    while len(outbox) and now < 50:
        now += 0.01
        for name, end in wanted.items():
            if name in outbox and (count := min(pipeline.draw.randrange(4), end - made[name])):
                outbox.append(name, tokens(count, made[name]), now)
                made[name] += count
                if made[name] == end:
                    outbox.finish(name, FinishReason.STOP, now)
        pipeline.step(outbox, now)
    assert pipeline.stored == {name: tokens(end) for name, end in wanted.items()}
    assert outbox.unacknowledged == 0


@pytest.mark.parametrize("seed", range(20))
def test_no_token_waits_longer_than_the_window_while_messages_are_taken_when_due(seed: int) -> None:
    draw = random.Random(seed)
    outbox = Outbox(flush_tokens=8, flush_interval_s=0.25, jitter=lambda: draw.uniform(0.75, 1.0))
    names = [f"n{number}" for number in range(6)]
    made = dict.fromkeys(names, 0)
    unsent: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        outbox.open(ref(name), b"")
    now = 0.0
    for _ in range(3000):
        step = draw.uniform(0.0, 0.02)
        while outbox.due <= now + step:
            now, step = max(now, outbox.due), max(0.0, now + step - outbox.due)
            for delta in outbox.take(now).deltas:
                waited = unsent[delta.ref.attempt_id]
                assert now - waited[0] <= 0.25 + 1e-9
                del waited[: len(delta.tokens) // TOKEN_BYTES]
        now += step
        name = draw.choice(names)
        outbox.append(name, tokens(1, made[name]), now)
        if made[name] == 0:
            assert outbox.due <= now + 0.02 + 1e-9
        made[name] += 1
        unsent[name].append(now)
        assert len(unsent[name]) <= 4
        assert all(now - waited[0] <= 0.25 + 1e-9 for waited in unsent.values() if waited)
