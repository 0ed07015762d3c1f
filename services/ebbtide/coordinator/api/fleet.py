"""Serves `ebbtide.v1.Fleet`: each worker's control and append streams."""
# ruff: noqa: N802, ARG002 - gRPC names the methods and hands each a context

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final, TypeAlias

import grpc
import msgspec
from google.protobuf.message import Message

from ebbtide.coordinator.api.calls import ListPage
from ebbtide.coordinator.append_streams import AppendStreams
from ebbtide.coordinator.fleet.flush_intervals import FlushIntervals
from ebbtide.coordinator.fleet.worker_registry import WorkerRegistry
from ebbtide.coordinator.state.worker_messages import (
    AssignBatch,
    Borrow,
    CancelBatch,
    CoordinatorMessage,
    Drain,
    Forecasts,
    Forget,
    Install,
    Release,
)
from ebbtide.coordinator.state.worker_reports import (
    AttachReport,
    DrainNotice,
    EngineChangedReport,
    HeartbeatReport,
    InstalledReport,
    InstallFailedReport,
    ReleasedReport,
)
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.errors import InvalidRequest, NotFound
from ebbtide.types.fleet import PROTOCOL_VERSION, AttemptRef, FlushPace
from ebbtide.types.ids import check_id
from ebbtide.v1 import fleet_pb2, fleet_pb2_grpc
from ebbtide.wire import from_proto, to_proto

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

SERVICE = "ebbtide.v1.Fleet"
#: A worker that opens a stream must identify itself within this time.
_HELLO_S: Final = 10.0
#: What workers report, by the kind of the message.
_RECORDS: Final[dict[str, type[msgspec.Struct]]] = {
    "heartbeat": HeartbeatReport,
    "installed": InstalledReport,
    "install_failed": InstallFailedReport,
    "engine_changed": EngineChangedReport,
    "released": ReleasedReport,
    "draining": DrainNotice,
}
#: What workers are told: the kind of each record's message.
_KINDS: Final[dict[type[msgspec.Struct], tuple[str, type[Message]]]] = {
    CancelBatch: ("cancel", fleet_pb2.CancelBatch),
    Install: ("install", fleet_pb2.Install),
    Drain: ("drain", fleet_pb2.Drain),
    Release: ("release", fleet_pb2.Release),
    Borrow: ("borrow", fleet_pb2.Borrow),
    Forget: ("forget", fleet_pb2.Forget),
    FlushPace: ("flush_interval", fleet_pb2.FlushInterval),
    Forecasts: ("forecasts", fleet_pb2.Forecasts),
}
#: Bytes of assignments per message: with one more rollout of the largest size it is well under the message limit.
_BATCH_BYTES: Final = 256 << 10


class FleetServicer(fleet_pb2_grpc.FleetServicer):
    def __init__(
        self, fleet: WorkerRegistry, appending: AppendStreams, flushes: FlushIntervals, *, heartbeat_s: float
    ) -> None:
        self._fleet, self._appending, self._flushes, self._heartbeat_s = fleet, appending, flushes, heartbeat_s

    async def Control(
        self, request_iterator: AsyncIterator[fleet_pb2.WorkerMessage], context: Context
    ) -> AsyncIterator[fleet_pb2.CoordinatorMessage]:
        hello = await _hello(request_iterator)
        session, adopted, superseded = self._fleet.attach(hello)
        reader = asyncio.create_task(self._read(request_iterator, session))
        reason = "its stream broke"
        try:
            yield fleet_pb2.CoordinatorMessage(attached=self._attached(session, adopted, superseded))
            while (told := await session.outbox.get()) is not None:
                for message in _messages(told):
                    yield message
            if reader.done():
                reason = "it closed its stream"
                reader.result()
            else:
                raise NotFound("this session is over: the worker attached again, or was silent for too long")
        except InvalidRequest as error:
            reason = f"it sent what cannot be: {error}"
            raise
        finally:
            reader.cancel()
            self._fleet.detach(session, reason)

    async def _read(self, requests: AsyncIterator[fleet_pb2.WorkerMessage], session: WorkerSession) -> None:
        try:
            async for message in requests:
                kind = message.WhichOneof("kind") or "attach"
                if kind == "attach":
                    raise InvalidRequest("only the first message may be, and must be, attach", field="kind")
                self._fleet.hear(session, from_proto(getattr(message, kind), _RECORDS[kind], field=kind))
        finally:
            session.outbox.end()

    def _attached(
        self, session: WorkerSession, adopted: list[AttemptRef], superseded: list[AttemptRef]
    ) -> fleet_pb2.Attached:
        pace = self._flushes.attached(session)
        return fleet_pb2.Attached(
            session=session.session_id,
            protocol_version=PROTOCOL_VERSION,
            heartbeat_s=self._heartbeat_s,
            flush_interval_s=pace.least_s,
            interactive_flush_s=pace.interactive_s,
            adopted=[to_proto(ref, fleet_pb2.AttemptRef) for ref in adopted],
            superseded=[to_proto(ref, fleet_pb2.AttemptRef) for ref in superseded],
        )

    async def Append(
        self, request_iterator: AsyncIterator[fleet_pb2.AppendRequest], context: Context
    ) -> AsyncIterator[fleet_pb2.AppendResponse]:
        async for response in self._appending.stream(request_iterator):
            yield response

    async def ListWorkers(
        self, request: fleet_pb2.ListWorkersRequest, context: Context
    ) -> fleet_pb2.ListWorkersResponse:
        await self._fleet.give_way()
        page = ListPage(fleet_pb2.Worker, request.page_size)
        for worker in self._fleet.workers():
            if worker.worker_id > request.cursor and not page.add(worker.worker_id, worker):
                break
        return fleet_pb2.ListWorkersResponse(workers=page.messages, next=page.next)

    async def DrainWorker(
        self, request: fleet_pb2.DrainWorkerRequest, context: Context
    ) -> fleet_pb2.DrainWorkerResponse:
        if not 0 < request.within_s < math.inf:  # on the control stream 0 means the worker's drain_timeout_s
            raise InvalidRequest("must be seconds from now, more than 0", field="within_s")
        worker_id = check_id(request.worker_id, field="worker_id")
        return fleet_pb2.DrainWorkerResponse(running=self._fleet.drain(worker_id, request.within_s))


async def _hello(requests: AsyncIterator[fleet_pb2.WorkerMessage]) -> AttachReport:
    try:
        async with asyncio.timeout(_HELLO_S):
            first = await anext(requests)
    except (TimeoutError, StopAsyncIteration):
        raise InvalidRequest("the first message must be attach", field="kind") from None
    if first.WhichOneof("kind") != "attach":
        raise InvalidRequest("the first message must be attach", field="kind")
    return from_proto(first.attach, AttachReport, field="attach")


def _messages(told: CoordinatorMessage) -> Iterator[fleet_pb2.CoordinatorMessage]:
    if isinstance(told, AssignBatch):
        yield from _assignments(told)
    else:
        kind, message_type = _KINDS[type(told)]
        yield fleet_pb2.CoordinatorMessage(**{kind: to_proto(told, message_type)})  # type: ignore[arg-type]


def _assignments(told: AssignBatch) -> Iterator[fleet_pb2.CoordinatorMessage]:
    """Rollouts in messages that are not too large."""
    batch, size = fleet_pb2.AssignBatch(ended=told.ended), 0
    for number, one in enumerate(told.assignments, 1):
        assignment = to_proto(one, fleet_pb2.Assignment)
        batch.assignments.append(assignment)
        size += assignment.ByteSize()
        if size >= _BATCH_BYTES or number == len(told.assignments):
            yield fleet_pb2.CoordinatorMessage(assign=batch)
            batch, size = fleet_pb2.AssignBatch(), 0
