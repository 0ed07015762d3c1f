"""The append stream: tokens out, acknowledgements in, opened anew after any failure.

Invariant: a stream begins again from what was acknowledged last (repeats are harmless at the other end), and
has one message in flight: a slow store makes messages larger, not more. What this process had in flight when it
dies was stored or was not; the rollouts go on elsewhere from whichever it is.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ebbtide import telemetry
from ebbtide.errors import Unavailable
from ebbtide.rollout_worker import metrics
from ebbtide.rollout_worker.attempts import Attempts
from ebbtide.rollout_worker.outbox import Ack, Delta, Outbox
from ebbtide.rpc.channel import write
from ebbtide.rpc.convert import to_proto
from ebbtide.rpc.retry import pauses
from ebbtide.rpc.status import translated
from ebbtide.runtime import race
from ebbtide.types.fleet import AppendStatus
from ebbtide.v1 import fleet_pb2, types_pb2
from ebbtide.v1.fleet_pb2_grpc import FleetStub

log = telemetry.get_logger(__name__)


class Appender:
    """Sends what the outbox has, within one session after the other."""

    def __init__(self, stub: FleetStub, target: str, outbox: Outbox, attempts: Attempts) -> None:
        self._stub, self._target, self._outbox, self._attempts = stub, target, outbox, attempts
        self._sequence = 0
        self._answered = asyncio.Event()

    async def run(self, session: str) -> None:
        """One stream after the other, for ever. Raises `NotFound` once the session is over."""
        for pause in pauses(0.05, 1.0):
            try:
                with translated("coordinator", self._target):
                    await self._stream(session)
            except Unavailable as error:
                log.warning("append stream broken", reason=str(error))
            await asyncio.sleep(pause)

    async def _stream(self, session: str) -> None:
        call = self._stub.Append()
        try:
            await write(call, fleet_pb2.AppendRequest(session=session))
            self._outbox.rewind(time.monotonic())
            await race(self._read(call), self._write(call, session))
        finally:
            call.cancel()

    async def _write(self, call: Any, session: str) -> None:
        while True:
            await self._until_due()
            self._sequence += 1
            start = time.monotonic()
            deltas = [_delta(delta) for delta in self._outbox.take(start)]
            self._answered.clear()
            await write(call, fleet_pb2.AppendRequest(session=session, sequence=self._sequence, deltas=deltas))
            await self._answered.wait()
            metrics.FLUSH_SECONDS.observe(time.monotonic() - start)

    async def _read(self, call: Any) -> None:
        async for response in call:
            answer = response.sequence == self._sequence and not self._answered.is_set()
            acks = [_ack(ack) for ack in response.acks]
            # A message is answered a second time once it has become durable: only its finishes are news then.
            self._settle(acks if answer else [ack for ack in acks if ack.finished], durable=response.durable)
            if answer:
                self._answered.set()
        raise Unavailable("the coordinator ended the append stream")

    def _settle(self, acks: Sequence[Ack], *, durable: bool) -> None:
        if acks:
            self._attempts.settle(acks, durable=durable)

    async def _until_due(self) -> None:
        due = self._attempts.due
        while (wait := self._outbox.due - time.monotonic()) > 0:
            due.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(wait, 3600.0)):
                    await due.wait()


def _delta(delta: Delta) -> fleet_pb2.Delta:
    return fleet_pb2.Delta(
        attempt=to_proto(delta.ref, fleet_pb2.AttemptRef),
        offset=delta.offset,
        tokens=delta.tokens,
        finish=types_pb2.FinishReason.ValueType(delta.finish or 0),
    )


def _ack(ack: fleet_pb2.AppendAck) -> Ack:
    return Ack(ack.attempt.attempt_id, AppendStatus(ack.status), ack.stored, ack.finished)
