"""Sends tokens over the append stream, applies acknowledgements, and reopens the stream after any failure.

Invariant: a stream begins again after the last acknowledged token (repeats are harmless). At most `_IN_FLIGHT` messages
are unanswered: a slow acknowledgement does not delay due tokens, and while the store is away messages grow larger, not
more. Answers come in the order of the messages. When this process dies, messages in flight may or may not be stored;
the rollouts go on elsewhere from what is.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, Final, NamedTuple

from ebbtide import telemetry
from ebbtide.errors import Unavailable
from ebbtide.rollout_worker import metrics
from ebbtide.rollout_worker.generation.local_attempts import LocalAttempts
from ebbtide.rollout_worker.generation.outbox import Outbox, OutboxMessage
from ebbtide.rpc.backoff import pauses
from ebbtide.rpc.channel import write, write_first
from ebbtide.runtime import race
from ebbtide.types.append_delta import AppendAck
from ebbtide.v1 import fleet_pb2
from ebbtide.v1.fleet_pb2_grpc import FleetStub
from ebbtide.wire.append_columns import AppendSender, acks

Translated = Callable[[], AbstractContextManager[None]]
log = telemetry.get_logger(__name__)
#: Messages in flight: two seconds' worth at four flushes a second.
_IN_FLIGHT: Final = 8
#: Weight of the newest acknowledgement in the mean lag.
_NEWEST: Final = 0.1
#: After a stream of this length, the next one opens soon.
_LONG_S: Final = 10.0


class SentMessage(NamedTuple):
    message: OutboxMessage
    since: float


class AppendStream:
    """One append stream, its unanswered messages, and its answered finishes that are not yet durable."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self._sender = AppendSender()
        self._flying: deque[SentMessage] = deque()
        self._finished: dict[int, list[AppendAck]] = {}
        self._answered = asyncio.Event()
        self.lag = 0.0  # mean seconds to an acknowledgement

    async def open(self, session: str) -> None:
        await write_first(self.call, fleet_pb2.AppendRequest(session=session))

    async def room(self) -> None:
        """Wait until one more message may be sent."""
        while len(self._flying) >= _IN_FLIGHT:
            self._answered.clear()
            await self._answered.wait()

    async def send(self, message: OutboxMessage) -> None:
        self._flying.append(SentMessage(message, time.monotonic()))
        await write(self.call, self._sender.request(message.number, message.deltas))

    def answered(self, response: fleet_pb2.AppendResponse) -> list[AppendAck]:
        """The new acknowledgements in an answer. Under `everysec` a message has two answers: one at once, one when it
        is durable."""
        if self._flying and response.sequence == self._flying[0].message.number:
            message, since = self._flying.popleft()
            took = time.monotonic() - since
            self.lag += _NEWEST * (took - self.lag)
            metrics.FLUSH_SECONDS.observe(took)
            self._answered.set()
            found = acks(message.deltas, response)
            if not response.durable and (finished := [ack for ack in found if ack.finished]):
                self._finished[response.sequence] = finished
            return found
        return self._finished.pop(response.sequence, []) if response.durable else []


class AppendClient:
    """Sends the outbox's messages, in one session after the other."""

    def __init__(self, stub: FleetStub, translated: Translated, outbox: Outbox, attempts: LocalAttempts) -> None:
        """`translated` turns gRPC's errors inside a block into the coordinator's."""
        self._stub, self._translated, self._outbox, self._attempts = stub, translated, outbox, attempts

    async def run(self, session: str) -> None:
        """Keep a stream open until the session is over. Raises `NotFound` then."""
        waits = pauses(0.05, 1.0)
        while True:
            began = time.monotonic()
            try:
                with self._translated():
                    await self._stream(session)
            except Unavailable as error:
                log.warning("append stream broken", reason=str(error))
            if time.monotonic() - began > _LONG_S:
                waits = pauses(0.05, 1.0)
            await asyncio.sleep(next(waits))

    async def _stream(self, session: str) -> None:
        stream = AppendStream(self._stub.Append())
        try:
            await stream.open(session)
            self._outbox.rewind(time.monotonic())
            await race(self._read(stream), self._write(stream))
        finally:
            stream.call.cancel()

    async def _write(self, stream: AppendStream) -> None:
        while True:
            await self._until_due()
            await stream.room()
            message = self._outbox.take(time.monotonic())
            if message.deltas:
                await stream.send(message)

    async def _read(self, stream: AppendStream) -> None:
        async for response in stream.call:
            found = stream.answered(response)
            self._outbox.lag = stream.lag
            if found:
                self._attempts.settle(found, durable=response.durable)
                self._attempts.due.set()  # tokens that the store lacks are due
        raise Unavailable("the coordinator ended the append stream")

    async def _until_due(self) -> None:
        due = self._attempts.due
        while (wait := self._outbox.due - time.monotonic()) > 0:
            due.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(wait, 3600.0)):
                    await due.wait()
