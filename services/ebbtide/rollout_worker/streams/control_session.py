"""Keeps the control stream and the append stream open, and reopens them after any failure.

Invariant: there is one session at a time. It begins with an attach that names all held attempts. The coordinator's
answer says which of them go on; all others are dropped. Without a session, generation goes on as far as the outbox
allows.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import PurePath
from typing import Any, Final

from ebbtide import telemetry
from ebbtide.errors import (
    EbbtideError,
    Internal,
    InvalidRequest,
    NotReady,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from ebbtide.rollout_worker.generation.generation import Assignment, HeldForecast
from ebbtide.rollout_worker.generation.local_attempts import HandBack
from ebbtide.rollout_worker.installs.weight_store import Installation
from ebbtide.rollout_worker.streams.append_client import AppendClient
from ebbtide.rollout_worker.streams.control_handler import ControlHandler
from ebbtide.rpc.backoff import pauses
from ebbtide.rpc.channel import write, write_first
from ebbtide.rpc.leader_channel import LeaderChannel
from ebbtide.runtime import race
from ebbtide.types.end_cause import EndCause
from ebbtide.types.fleet import PROTOCOL_VERSION, AttemptRef, FlushPace
from ebbtide.types.weights import PolicyVersion
from ebbtide.v1 import fleet_pb2
from ebbtide.v1.fleet_pb2_grpc import FleetStub
from ebbtide.wire.record_conversion import from_proto

log = telemetry.get_logger(__name__)

#: Errors that a retry does not cure.
_FATAL: Final = (InvalidRequest, Unauthenticated, PermissionDenied, NotReady, Internal)
_ATTACH_S: Final = 15.0
#: Retry interval of a worker that is leaving.
_HURRY_S: Final = 0.2


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
            if time.monotonic() - began > 10.0:
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
                why = HandBack(EndCause.MOVED, message.release.reason or "moved")
                worker.release(_refs(message.release.attempts), why)
            case "install":
                install = message.install
                version = from_proto(install.version, PolicyVersion)
                change = (PurePath(install.model).name or install.run_id) if install.change else ""
                worker.installer.wish(Installation(install.run_id, version, install.publisher), change)
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
                self._worker.outgoing.release(_refs([item.attempt]), HandBack(EndCause.FAILED, str(error)))


def _refs(refs: Iterable[fleet_pb2.AttemptRef]) -> list[AttemptRef]:
    return [from_proto(ref, AttemptRef) for ref in refs]
