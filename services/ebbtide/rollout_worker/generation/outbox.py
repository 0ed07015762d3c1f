"""Keeps generated tokens until they are safely stored, and says when to send them. Pure: callers pass `now` (seconds,
monotonic).

Invariant: an attempt's whole response, partial included, stays here from its assignment until its finish is durable, or
it is superseded, released or cancelled; so all that the store forgets can be sent again. 0 <= stored <= length and
0 <= sent <= length always. While messages are taken when due, no rollout has half a window of unsent tokens, and no
token waits unsent for longer than its lane says: so with prompt acknowledgements, unsent and unacknowledged tokens lie
within one window. A message for interactive rollouts carries batch tokens only if these are due, too. When this process
dies the outbox is gone: the rollout goes on elsewhere from its stored tokens.

Tokens of batch rollouts go in bulk (`BatchLane`), those of interactive ones soon (`InteractiveLane`). The batch lane
knows nothing of the interactive one, so batch rollouts keep their times whatever else the worker generates. While
tokens are taken when due, a batch token waits for at most the interval less `lag` (half the interval if that is more).
An interactive token waits for at most its interval; for a quarter of `lag` if that is more, but never for more than a
batch interval. A lane that has nothing to send is due at infinity.

An engine may hold tokens of batch rollouts back until it has `stream_interval` of one. They lie in this process, too,
and count as unsent: the window leaves room for them, and while a batch rollout has tokens, its lane is due once in an
interval, whatever is known to be unsent. Whoever takes a message then fetches them before (`takes_all`).
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from ebbtide.append_stream import MAX_DELTAS, AppendAck, AppendDelta
from ebbtide.types.fleet import INTERACTIVE_FLUSH_S, AppendStatus, AttemptRef, FlushPace, FlushWindow
from ebbtide.types.rollout import FinishReason
from ebbtide.types.tokens import TOKEN_BYTES

#: Random shares of the interval, so that workers do not all flush at the same moment.
JITTER: Final = (0.9, 1.0)
#: A batch rollout's finish, and an attempt's first token, wait this long for others to share the message.
_URGENT_S: Final = 0.02
#: While acknowledgements are late, interactive messages go less often: no more than so many wait for theirs.
_UNANSWERED: Final = 4
#: Tokens in one message: 12 bytes each, well below the 4 MiB that a message may have.
MESSAGE_TOKENS: Final = 200_000
#: Deltas in one message: the coordinator takes no more.
MESSAGE_DELTAS: Final = MAX_DELTAS


class OutboxMessage(NamedTuple):
    """One message to the store."""

    number: int  # counts messages; acknowledgements carry it
    deltas: list[AppendDelta]


class SettledOutput(NamedTuple):
    """Attempts that left the outbox."""

    finished: list[AttemptRef]  # durable
    superseded: list[AttemptRef]  # of other workers now


class BatchLane:
    """Tokens of batch rollouts. All go by `_due`; the few `_urgent` ones go earlier, in messages of their own, so that
    other tokens still travel in bulk.
    """

    def __init__(self, jitter: Callable[[], float]) -> None:
        """`jitter` returns a factor in (0, 1] for each interval."""
        self._jitter = jitter
        self._due = self._urgent_due = math.inf
        self._urgent: dict[str, None] = {}  # attempt ids, oldest first
        self.interval_s = 0.0

    @property
    def due(self) -> float:
        return min(self._due, self._urgent_due)

    def wait(self, now: float, lag_s: float) -> None:
        """Have new tokens sent so early that they are acknowledged within the interval; `lag_s`: what that takes."""
        if self._due == math.inf:
            spare = max(self.interval_s / 2, self.interval_s - lag_s)
            self._due = now + min(spare, self.interval_s * self._jitter())

    def hurry(self, attempt_id: str, now: float) -> None:
        """Have an attempt's first token, or its finish, sent soon."""
        self._urgent[attempt_id] = None
        self._urgent_due = min(self._urgent_due, now + min(_URGENT_S, self.interval_s))

    def bring_forward(self, now: float) -> None:
        """Make all unsent tokens due."""
        self._due = min(self._due, now)

    def drop(self, attempt_id: str) -> None:
        self._urgent.pop(attempt_id, None)

    def rewind(self) -> None:
        """Forget when unsent tokens were due."""
        self._due = math.inf

    def whole(self, now: float) -> bool:
        """Whether a message taken now has all unsent tokens."""
        return self.due <= now and (self._urgent_due == math.inf or self._due <= now + _URGENT_S)

    def take(self, now: float) -> tuple[Mapping[str, None], bool]:
        """The urgent attempts to send now, and whether to send all others, too."""
        if self.due > now:
            return {}, False
        whole = self.whole(now)
        if whole:
            self._due = math.inf
        urgent, self._urgent, self._urgent_due = self._urgent, {}, math.inf
        return urgent, whole


class InteractiveLane:
    """Tokens of interactive rollouts. The first token of an attempt, a finish, and whatever comes after a pause go at
    once; from then on messages go once in an interval.
    """

    def __init__(self) -> None:
        self.due = math.inf
        self._sent = -math.inf  # when its last message was taken
        self.interval_s = self.longest_s = INTERACTIVE_FLUSH_S  # the latter while acknowledgements are late

    def wait(self, now: float, lag_s: float) -> None:
        """Have new tokens sent with the next message. `lag_s`: usual seconds to an acknowledgement."""
        between_s = max(self.interval_s, min(lag_s / _UNANSWERED, self.longest_s))
        self.due = min(self.due, max(now, self._sent + between_s))

    def hurry(self, _attempt_id: str, now: float) -> None:
        """Have an attempt's first token, or its finish, sent at once."""
        self.bring_forward(now)

    def bring_forward(self, now: float) -> None:
        """Make all unsent tokens due."""
        self.due = min(self.due, now)

    def drop(self, attempt_id: str) -> None: ...

    def rewind(self) -> None:
        """Forget when unsent tokens were due."""
        self.due = math.inf

    def take(self, now: float, *, along: bool) -> bool:
        """Whether to send the unsent tokens now; they go `along` with any other message."""
        if self.due > now and not (along and self.due < math.inf):
            return False
        self.due, self._sent = math.inf, now
        return True


FlushLane = BatchLane | InteractiveLane


class RolloutOutput:
    """One attempt's response."""

    def __init__(self, ref: AttemptRef, partial: bytes, lane: FlushLane, *, whole: bool) -> None:
        self.ref, self.lane, self.whole = ref, lane, whole
        self.tokens = bytearray(partial)
        self.begin = self.sent = self.stored = self.length
        self.finish: FinishReason | None = None
        self.finish_sent = False
        self.asked = False  # ask the store what it has, even without tokens to send
        self.doubted = False  # the store has forgotten the rollout, and refuses tokens until it knows it again
        self.turned = 0  # the last message taken before the last wind-back; answers up to it no longer count

    @property
    def length(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def wants_sending(self) -> bool:
        return self.sent < self.length or self.asked or (self.finish is not None and not self.finish_sent)

    def take(self, limit: int) -> AppendDelta:
        offset, end = self.sent, min(self.length, self.sent + limit)
        self.sent, self.asked = end, False
        self.finish_sent = end == self.length and self.finish is not None
        tokens = bytes(memoryview(self.tokens)[offset * TOKEN_BYTES : end * TOKEN_BYTES])
        return AppendDelta(self.ref, offset, tokens, self.finish if self.finish_sent else None)

    def wind_back(self, to: int, message: int) -> None:
        """Send again from token `to` on; messages up to `message` are already out."""
        self.sent, self.finish_sent, self.doubted, self.turned = to, False, False, message


class Outbox:
    """The outputs of all held attempts, and when the next message is due."""

    def __init__(
        self,
        *,
        flush_tokens: int,
        flush_interval_s: float,
        step_tokens: int = 1,
        stream_interval: int = 1,
        jitter: Callable[[], float] = lambda: 1.0,
    ) -> None:
        """The window of batch rollouts: tokens of a rollout or seconds, whichever is less. `step_tokens`: that an
        engine makes of a rollout in one step, at most. `stream_interval`: that it delivers together, a quarter of the
        window at most. `jitter`: of its intervals, see `BatchLane`.
        """
        self._step_tokens, self._held_back = step_tokens, stream_interval - 1
        self._outputs: dict[str, RolloutOutput] = {}
        self._own = self._window = FlushWindow(flush_tokens, flush_interval_s)
        self._batch, self._interactive = BatchLane(jitter), InteractiveLane()
        self.lag = 0.0  # usual seconds from a message to its acknowledgement; the sender sets it
        self._messages = 0
        self.unacknowledged = 0
        #: Unfinished attempts with most of a window unacknowledged: generation should wait for the store.
        self.behind: set[str] = set()
        self._set_windows(FlushPace())

    def pace(self, pace: FlushPace, now: float) -> None:
        """Flush no more often than that; the window of batch rollouts grows in proportion."""
        before = self._window
        self._set_windows(pace)
        if self._window != before:
            self.flush(now)  # what is unsent may be due already in a shorter window
        for output in self._outputs.values():
            self._weigh(output)

    def _set_windows(self, pace: FlushPace) -> None:
        self._window = window = self._own.stretched(pace.least_s)
        self._batch.interval_s = window.interval_s
        self._interactive.interval_s = min(max(INTERACTIVE_FLUSH_S, pace.interactive_s), window.interval_s)
        self._interactive.longest_s = window.interval_s
        # The rest of the window is for tokens until the engine stops: those of the step that made it too many, with
        # those that were held back before it, and of the next one.
        room = window.tokens + 1 - 2 * self._step_tokens - self._held_back
        self._many = min(-(-3 * window.tokens // 4), max(1, room))
        self._enough = max(1, min(-(-window.tokens // 2), -(-2 * self._many // 3)) - self._held_back)

    def __len__(self) -> int:
        return len(self._outputs)

    def __contains__(self, attempt_id: str) -> bool:
        return attempt_id in self._outputs

    @property
    def due(self) -> float:
        """When the next message should go; infinity while there is nothing to send."""
        return min(self._batch.due, self._interactive.due)

    def held(self) -> list[tuple[AttemptRef, int]]:
        return [(output.ref, output.length) for output in self._outputs.values()]

    def stored_whole(self, attempt_id: str) -> bool:
        """Whether the store has all tokens of this attempt."""
        output = self._outputs[attempt_id]
        return output.stored == output.length

    def open(self, ref: AttemptRef, partial: bytes, *, interactive: bool = False, whole: bool = False) -> None:
        """`whole`: its response is sent in one message, so that it is stored whole or not at all."""
        lane = self._interactive if interactive else self._batch
        self._outputs[ref.attempt_id] = RolloutOutput(ref, partial, lane, whole=whole)

    def append(self, attempt_id: str, tokens: bytes, now: float) -> None:
        output = self._outputs[attempt_id]
        before, lane = output.length, output.lane
        output.tokens += tokens
        self.unacknowledged += len(tokens) // TOKEN_BYTES
        self._weigh(output)
        if output.length - output.sent >= self._enough:
            lane.bring_forward(now)
        else:
            lane.wait(now, self.lag)
        if before == output.begin:
            lane.hurry(attempt_id, now)

    def finish(self, attempt_id: str, reason: FinishReason, now: float) -> None:
        output = self._outputs[attempt_id]
        output.finish = reason
        self.behind.discard(attempt_id)
        output.lane.hurry(attempt_id, now)

    def drop(self, attempt_id: str) -> None:
        """Forget an attempt, if it is held."""
        self.behind.discard(attempt_id)
        if output := self._outputs.pop(attempt_id, None):
            output.lane.drop(attempt_id)
            self.unacknowledged -= output.length - output.stored

    def flush(self, now: float) -> None:
        """Make all unsent tokens due."""
        for output in self._outputs.values():
            if output.wants_sending or self._may_be_held(output):
                output.lane.bring_forward(now)

    def takes_all(self, now: float) -> bool:
        """Whether `take` would send all unsent tokens of batch rollouts now."""
        return self._batch.whole(now)

    def _may_be_held(self, output: RolloutOutput) -> bool:
        """Whether the engine may hold tokens of it back: never its first one."""
        begun = self._held_back and output.length > output.begin
        return bool(begun) and output.finish is None and output.lane is self._batch

    def rewind(self, now: float) -> None:
        """Begin a new stream: send unacknowledged tokens again, and ask the store whether it still has the others."""
        for output in self._outputs.values():
            output.wind_back(output.stored, self._messages)
            output.asked = True
        for lane in (self._batch, self._interactive):
            lane.rewind()
        self.flush(now)

    def take(self, now: float) -> OutboxMessage:
        """The next message: what is due; its tokens count as sent. If it cannot hold all, another one is due."""
        urgent, whole = self._batch.take(now)
        outputs = list[RolloutOutput]()
        if self._interactive.take(now, along=whole or bool(urgent)):
            outputs += [output for output in self._outputs.values() if output.lane is self._interactive]
        outputs += [self._outputs[attempt_id] for attempt_id in urgent if attempt_id in self._outputs]
        if whole:
            batch = ((name, output) for name, output in self._outputs.items() if output.lane is self._batch)
            outputs += [output for name, output in batch if name not in urgent]
            if any(map(self._may_be_held, self._outputs.values())):
                self._batch.wait(now, self.lag)
        self._messages += 1
        return OutboxMessage(self._messages, self._filled(outputs, now))

    def _filled(self, outputs: Iterable[RolloutOutput], now: float) -> list[AppendDelta]:
        room = MESSAGE_TOKENS
        deltas: list[AppendDelta] = []
        for output in outputs:
            if not output.wants_sending:
                continue
            fits = room > 0 and (not output.whole or output.length - output.sent <= room)
            if fits and len(deltas) < MESSAGE_DELTAS:
                delta = output.take(room)
                room -= len(delta.tokens) // TOKEN_BYTES
                deltas.append(delta)
            if output.wants_sending:
                output.lane.bring_forward(now)
        return deltas

    def settle(self, acks: Iterable[AppendAck], *, durable: bool, now: float) -> SettledOutput:
        """Apply what the store has; `durable`: no single failure of the store loses it."""
        done = SettledOutput([], [])
        for ack in acks:
            output = self._outputs.get(ack.attempt_id)
            if output is None:
                continue
            if ack.status is AppendStatus.SUPERSEDED or ack.stored > output.length:
                # More tokens are stored than were generated here: another worker went on with this rollout.
                done.superseded.append(output.ref)
                self.drop(ack.attempt_id)
                continue
            self.unacknowledged += output.stored - ack.stored
            output.stored = ack.stored
            output.doubted = ack.status is AppendStatus.STORED and ack.stored == 0 < output.sent
            self._weigh(output)
            if ack.status is AppendStatus.GAP:
                self._gap(output, ack, now)
                continue
            output.sent = max(output.sent, ack.stored)
            if ack.finished and durable:
                done.finished.append(output.ref)
                self.drop(ack.attempt_id)
        return done

    def _weigh(self, output: RolloutOutput) -> None:
        prompt = output.length - output.stored < self._many
        if prompt or output.doubted or output.finish is not None:
            self.behind.discard(output.ref.attempt_id)
        else:
            self.behind.add(output.ref.attempt_id)

    def _gap(self, output: RolloutOutput, ack: AppendAck, now: float) -> None:
        """Send again from the store's position; once, although messages after the refused one are refused too."""
        if not 0 < ack.message <= output.turned:
            output.wind_back(ack.stored, self._messages)
            output.lane.bring_forward(now)
