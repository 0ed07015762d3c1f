"""What was generated and is not safely stored yet. Pure: handed `now` (seconds, monotonic).

Invariant: an attempt's whole response, partial included, stays here from its assignment until its finish is
durable, or it is superseded, released or cancelled; so whatever the store forgets can be sent again. 0 <=
stored <= length and 0 <= sent <= length always. When this process dies the outbox is gone: the rollout goes on
elsewhere from what was stored.
"""

import math
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from ebbtide.types.fleet import AppendStatus, AttemptRef
from ebbtide.types.rollout import FinishReason
from ebbtide.types.tokens import TOKEN_BYTES

#: Tokens in one message: 12 bytes each, well below the 4 MiB that a message may have.
MESSAGE_TOKENS: Final = 200_000
#: Deltas in one message: the coordinator takes no more.
MESSAGE_DELTAS: Final = 1024
#: A finish waits this long for others, that they may share a message.
_FINISH_DELAY_S: Final = 0.02


class Delta(NamedTuple):
    """Tokens of one attempt from `offset` on, packed; `finish` on its last."""

    ref: AttemptRef
    offset: int
    tokens: bytes
    finish: FinishReason | None


class Ack(NamedTuple):
    attempt_id: str
    status: AppendStatus
    stored: int
    finished: bool


class Settled(NamedTuple):
    """Attempts that left the outbox: `finished` ones are durable, `superseded` ones belong to somebody else."""

    finished: list[AttemptRef]
    superseded: list[AttemptRef]


class Output:
    """One attempt's response."""

    def __init__(self, ref: AttemptRef, partial: bytes) -> None:
        self.ref = ref
        self.tokens = bytearray(partial)
        self.sent = self.stored = self.length
        self.finish: FinishReason | None = None
        self.finish_sent = False

    @property
    def length(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def wants_sending(self) -> bool:
        return self.sent < self.length or (self.finish is not None and not self.finish_sent)

    def take(self, limit: int) -> Delta:
        offset, end = self.sent, min(self.length, self.sent + limit)
        self.sent = end
        self.finish_sent = end == self.length and self.finish is not None
        tokens = bytes(self.tokens[offset * TOKEN_BYTES : end * TOKEN_BYTES])
        return Delta(self.ref, offset, tokens, self.finish if self.finish_sent else None)


class Outbox:
    """The outputs of all attempts held, and when the next message is due."""

    def __init__(
        self, *, flush_tokens: int, flush_interval_s: float, limit: int, jitter: Callable[[], float] = lambda: 1.0
    ) -> None:
        """`limit`: unacknowledged tokens from which on the outbox is full. `jitter` gives a factor in (0, 1] for each
        interval, so that workers do not flush in the same instant.
        """
        self._limit = limit
        self._outputs: dict[str, Output] = {}
        self._flush_tokens, self._interval, self._jitter = flush_tokens, flush_interval_s, jitter
        self._due = math.inf
        self.unacknowledged = 0

    def __len__(self) -> int:
        return len(self._outputs)

    def __contains__(self, attempt_id: str) -> bool:
        return attempt_id in self._outputs

    @property
    def due(self) -> float:
        """When the next message should go; infinity while there is nothing to send."""
        return self._due

    @property
    def full(self) -> bool:
        """Whether the store is so far behind that generation should wait for it."""
        return self.unacknowledged > self._limit

    @property
    def roomy(self) -> bool:
        """Whether it has caught up enough to go on."""
        return self.unacknowledged <= self._limit // 2

    def held(self) -> list[tuple[AttemptRef, int]]:
        return [(output.ref, output.length) for output in self._outputs.values()]

    def stored_whole(self, attempt_id: str) -> bool:
        """Whether the store has all that this attempt generated."""
        output = self._outputs[attempt_id]
        return output.stored == output.length

    def open(self, ref: AttemptRef, partial: bytes) -> None:
        self._outputs[ref.attempt_id] = Output(ref, partial)

    def append(self, attempt_id: str, tokens: bytes, now: float) -> None:
        output = self._outputs[attempt_id]
        output.tokens += tokens
        self.unacknowledged += len(tokens) // TOKEN_BYTES
        if output.length - output.sent >= self._flush_tokens:
            self._due = min(self._due, now)
        elif self._due == math.inf:
            self._due = now + self._interval * self._jitter()

    def finish(self, attempt_id: str, reason: FinishReason, now: float) -> None:
        self._outputs[attempt_id].finish = reason
        self._due = min(self._due, now + min(_FINISH_DELAY_S, self._interval))

    def drop(self, attempt_id: str) -> None:
        """Forget an attempt; one that is not held is none."""
        if output := self._outputs.pop(attempt_id, None):
            self.unacknowledged -= output.length - output.stored

    def flush(self, now: float) -> None:
        """Make all that is unsent due."""
        if any(output.wants_sending for output in self._outputs.values()):
            self._due = min(self._due, now)

    def rewind(self, now: float) -> None:
        """A new stream: what was sent and not acknowledged is sent again."""
        for output in self._outputs.values():
            output.sent, output.finish_sent = output.stored, False
        self._due = math.inf
        self.flush(now)

    def take(self, now: float) -> list[Delta]:
        """The deltas of the next message; they count as sent. Several messages where one cannot hold all."""
        room = MESSAGE_TOKENS
        deltas: list[Delta] = []
        self._due = math.inf
        for output in self._outputs.values():
            if not output.wants_sending:
                continue
            if room <= 0 or len(deltas) == MESSAGE_DELTAS:
                self._due = now
                break
            delta = output.take(room)
            room -= len(delta.tokens) // TOKEN_BYTES
            deltas.append(delta)
            if output.wants_sending:
                self._due = now
        return deltas

    def settle(self, acks: Iterable[Ack], *, durable: bool, now: float) -> Settled:
        """Take note of what the store has; `durable` says whether it is fsynced."""
        done = Settled([], [])
        for ack in acks:
            output = self._outputs.get(ack.attempt_id)
            if output is None:
                continue
            if ack.status is AppendStatus.SUPERSEDED or ack.stored > output.length:
                # More than was generated here is stored: somebody else went on with this rollout.
                done.superseded.append(output.ref)
                self.drop(ack.attempt_id)
                continue
            self.unacknowledged += output.stored - ack.stored
            output.stored = ack.stored
            if ack.status is AppendStatus.GAP:
                output.sent, output.finish_sent = ack.stored, False
                self._due = min(self._due, now)
            elif ack.finished and durable:
                done.finished.append(output.ref)
                self.drop(ack.attempt_id)
        return done
