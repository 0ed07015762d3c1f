"""Keeps the control stream and the append stream to the coordinator open, and reopens them after any failure.

Invariant: there is one session at a time. It begins with an attach that names all held attempts. The coordinator's
answer says which of them go on; all others are dropped. Without a session, generation goes on as far as the outbox
allows.

An append stream begins again after the last acknowledged token (repeats are harmless). At most `_IN_FLIGHT` messages
are unanswered: a slow acknowledgement does not delay due tokens, and while the store is away messages grow larger, not
more. Answers come in the order of the messages. When this process dies, messages in flight may or may not be stored;
the rollouts go on elsewhere from what is.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any, Final, NamedTuple

from ebbtide import telemetry
from ebbtide.append_stream import AppendAck, AppendSender, acks
from ebbtide.errors import (
    EbbtideError,
    Internal,
    InvalidRequest,
    NotReady,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from ebbtide.hub_models import model_name
from ebbtide.rollout_worker import metrics
from ebbtide.rollout_worker.control_handler import ControlHandler
from ebbtide.rollout_worker.generation.generation import Assignment, HeldForecast
from ebbtide.rollout_worker.generation.local_attempts import LocalAttempts, ReleaseReason
from ebbtide.rollout_worker.generation.outbox import Outbox, OutboxMessage
from ebbtide.rollout_worker.installs.weight_store import TargetVersion
from ebbtide.rpc.backoff import pauses
from ebbtide.rpc.channel import write, write_first
from ebbtide.rpc.leader_channel import LeaderChannel
from ebbtide.runtime import race
from ebbtide.types.fleet import PROTOCOL_VERSION, AttemptRef, EndCause, FlushPace
from ebbtide.types.weights import PolicyVersion
from ebbtide.v1 import fleet_pb2
from ebbtide.v1.fleet_pb2_grpc import FleetStub
from ebbtide.wire import from_proto

log = telemetry.get_logger(__name__)

#: Errors that a retry does not cure.
_FATAL: Final = (InvalidRequest, Unauthenticated, PermissionDenied, NotReady, Internal)
_ATTACH_S: Final = 15.0
#: Retry interval of a worker that is leaving.
_HURRY_S: Final = 0.2
#: Messages in flight: two seconds' worth at four flushes a second.
_IN_FLIGHT: Final = 8
#: Weight of the newest acknowledgement in the mean lag.
_NEWEST: Final = 0.1
#: After a stream of this length, the next one opens soon.
_LONG_S: Final = 10.0

Translated = Callable[[], AbstractContextManager[None]]


class ControlSession:
    """Keeps the worker attached."""

    def __init__(self, worker: ControlHandler, heads: LeaderChannel, *, attached: Callable[[], None]) -> None:
        """`attached` is called after each attach."""
        self._worker, self._heads = worker, heads
        self._stub = FleetStub(heads)
        self._appender = AppendClient(self._stub, heads.translated, worker.outbox, worker.attempts)
        self._attached = attached
        self.connected = False

    async def run(self) -> None:
        """Stay attached until the worker has drained. Raises errors that a retry does not cure."""
        waits = pauses(0.1, 2.0)
        while True:
            began = time.monotonic()
            try:
                await self._attach()
            except _FATAL:
                raise
            except EbbtideError as error:
                log.warning("detached", reason=str(error))
            else:
                return
            if time.monotonic() - began > _LONG_S:
                waits = pauses(0.1, 2.0)
            await self._wait(next(waits))

    async def _wait(self, pause_s: float) -> None:
        """Pause before a retry; briefly if the worker is leaving."""

        async def hurry() -> None:
            await self._worker.leaving.wait()
            await asyncio.sleep(_HURRY_S)

        await race(self._heads.pause(pause_s), hurry())

    async def _attach(self) -> None:
        with self._heads.translated():
            call = self._stub.Control()
            try:
                attached = await self._hello(call)
                self._adopt(attached)
                await race(
                    self._receive(call),
                    self._send(call),
                    self._beat(attached.heartbeat_s),
                    self._appender.run(attached.session),
                )
            finally:
                self.connected = False
                call.cancel()

    async def _hello(self, call: Any) -> fleet_pb2.Attached:
        try:
            async with asyncio.timeout(_ATTACH_S):
                await write_first(call, self._worker.attach())
                first = await anext(aiter(call), None)
        except TimeoutError:
            raise Unavailable(f"the coordinator did not answer the attach within {_ATTACH_S:g} s") from None
        if first is None or first.WhichOneof("kind") != "attached":
            raise Unavailable("the coordinator did not answer the attach")
        answer: fleet_pb2.Attached = first.attached
        if answer.protocol_version != PROTOCOL_VERSION:
            raise NotReady(
                f"the coordinator speaks protocol {answer.protocol_version}, this worker {PROTOCOL_VERSION}; "
                "run the same version of Ebbtide on both"
            )
        return answer

    def _adopt(self, attached: fleet_pb2.Attached) -> None:
        worker = self._worker
        adopted = {ref.attempt_id for ref in attached.adopted}
        lost = [ref for ref, _ in worker.outbox.held() if ref.attempt_id not in adopted]
        worker.attempts.drop(lost, "superseded")
        worker.pace_flushes(FlushPace(attached.flush_interval_s, attached.interactive_flush_s))
        self.connected = True
        log.info("attached", session=attached.session, adopted=len(adopted), superseded=len(lost))
        self._attached()

    async def _send(self, call: Any) -> None:
        queue = self._worker.outgoing.queue
        while (message := await queue.get()) is not None:
            await write(call, message)
        await call.done_writing()
        await asyncio.Event().wait()  # the coordinator ends the stream, and with it the session

    async def _beat(self, interval_s: float) -> None:
        """Send heartbeats at the interval, and at once when one is due."""
        news = self._worker.beat
        while True:
            news.clear()
            self._worker.outgoing.put(self._worker.heartbeat())
            with suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await news.wait()

    async def _receive(self, call: Any) -> None:
        async for message in call:
            self._handle(message)
        if not self._worker.drained:
            raise Unavailable("the coordinator ended the stream")

    def _handle(self, message: fleet_pb2.CoordinatorMessage) -> None:
        """Returns at once, so that no message delays the next."""
        worker = self._worker
        match message.WhichOneof("kind"):
            case "assign":
                worker.attempts.forget_cached(message.assign.ended)
                worker.assign(self._readable(message.assign.assignments))
            case "cancel":
                worker.cancel(_refs(message.cancel.attempts))
            case "release":
                why = ReleaseReason(EndCause.MOVED, message.release.reason or "moved")
                worker.release(_refs(message.release.attempts), why)
            case "install":
                install = message.install
                version = from_proto(install.version, PolicyVersion)
                change = (model_name(install.model) or install.run_id) if install.change else ""
                worker.installer.set_target(TargetVersion(install.run_id, version, install.publisher), change)
            case "forget":
                worker.forget(message.forget.run_id)
            case "borrow":
                worker.borrow(wanted=message.borrow.wanted, reason=message.borrow.reason)
            case "forecasts":
                worker.foresee(from_proto(one, HeldForecast) for one in message.forecasts.forecasts)
            case "flush_interval":
                worker.pace_flushes(from_proto(message.flush_interval, FlushPace))
            case "drain":
                worker.leave(message.drain.deadline_s or worker.settings.drain_timeout_s, "asked")
            case other:
                log.warning("message not understood", kind=other)

    def _readable(self, items: Iterable[fleet_pb2.Assignment]) -> Iterator[Assignment]:
        """The readable assignments. Hands the others back: one rollout must not end the worker."""
        for item in items:
            try:
                yield from_proto(item, Assignment)
            except InvalidRequest as error:
                log.warning("not taken", rollout_id=item.attempt.rollout_id, reason=str(error))
                self._worker.outgoing.release(_refs([item.attempt]), ReleaseReason(EndCause.FAILED, str(error)))


def _refs(refs: Iterable[fleet_pb2.AttemptRef]) -> list[AttemptRef]:
    return [from_proto(ref, AttemptRef) for ref in refs]


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
            message = await self._attempts.message()
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
