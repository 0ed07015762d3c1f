"""A coordinator's side of workers' streams that can be made to misbehave, on real gRPC."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from ebbtide.append_stream import AppendAck, AppendDelta, AppendReceiver
from ebbtide.errors import NotFound, StoreUnavailable
from ebbtide.types.fleet import PROTOCOL_VERSION, AppendStatus, EndCause
from ebbtide.types.run import Sampling
from ebbtide.types.tokens import TOKEN_BYTES, pack_ids, unpack_tokens
from ebbtide.types.weights import PolicyVersion
from ebbtide.v1 import fleet_pb2, fleet_pb2_grpc, types_pb2
from ebbtide.wire import to_proto
from tests.fakes.append_deltas import answer, deltas
from tests.fakes.scripted_relay import POLICY, RUN
from tests.support.waiting import wait_until

PROMPT = (40, 41, 42)


class ScriptedFleet(fleet_pb2_grpc.FleetServicer):
    """Keeps tokens as the real one does: fenced by attempt and offset. One worker at a time."""

    def __init__(self) -> None:
        self.attaches: list[fleet_pb2.Attach] = []
        self.heard: dict[str, list[Any]] = {}
        self.stored: dict[str, bytes] = {}
        self.finished: dict[str, int] = {}
        self.fences: dict[str, str] = {}
        self.protocol_version = PROTOCOL_VERSION
        self.adopting = True
        self.away = False  # who attaches is turned away
        self.refused = 0
        self.lossy = False  # acknowledgements are lost, and the stream with them
        self.durable = True
        self.heartbeat_s = 0.05
        self.store_up = asyncio.Event()
        self.store_up.set()
        self.messages = 0
        self._out: asyncio.Queue[fleet_pb2.CoordinatorMessage | None] = asyncio.Queue()

    async def Control(self, request_iterator: AsyncIterator[fleet_pb2.WorkerMessage], context: Any) -> Any:
        attach = (await anext(request_iterator)).attach
        if self.away:
            self.refused += 1
            raise StoreUnavailable("away")
        self.attaches.append(attach)
        out = self._out = asyncio.Queue()
        refs = [held.attempt for held in attach.held]
        mine = [ref for ref in refs if self.adopting and self.fences.get(ref.rollout_id) == ref.attempt_id]
        session, speaks = f"session{len(self.attaches)}", self.protocol_version
        attached = fleet_pb2.Attached(session=session, protocol_version=speaks, adopted=mine)
        attached.heartbeat_s = self.heartbeat_s
        attached.superseded.extend(ref for ref in refs if ref not in mine)
        reader = asyncio.create_task(self._read(request_iterator, out))
        try:
            yield fleet_pb2.CoordinatorMessage(attached=attached)
            while (message := await out.get()) is not None:
                yield message
        finally:
            reader.cancel()

    async def _read(self, requests: AsyncIterator[fleet_pb2.WorkerMessage], out: asyncio.Queue[Any]) -> None:
        async for message in requests:
            kind = message.WhichOneof("kind")
            assert kind is not None
            self.heard.setdefault(kind, []).append(getattr(message, kind))
        out.put_nowait(None)

    async def Append(self, request_iterator: AsyncIterator[fleet_pb2.AppendRequest], context: Any) -> Any:
        receiver, name = AppendReceiver(), ""
        async for request in request_iterator:
            name = request.session or name
            if name != f"session{len(self.attaches)}":
                raise NotFound("this session is over")
            await self.store_up.wait()
            found = deltas(receiver, request)
            acks = [self._append(delta) for delta in found]
            self.messages += bool(acks)
            if self.lossy and acks:
                self.lossy = False
                raise StoreUnavailable("the store went away with the acknowledgement")
            yield answer(request.sequence, found, acks, durable=self.durable)

    def DrainWorker(self, request: fleet_pb2.DrainWorkerRequest, context: Any) -> Any:
        raise NotImplementedError

    def ListWorkers(self, request: fleet_pb2.ListWorkersRequest, context: Any) -> Any:
        raise NotImplementedError

    def _append(self, delta: AppendDelta) -> AppendAck:
        name, count = delta.ref.rollout_id, len(delta.tokens) // TOKEN_BYTES
        attempt_id, length = delta.ref.attempt_id, self.length(name)
        if self.fences.get(name) != attempt_id:
            return AppendAck(attempt_id, AppendStatus.SUPERSEDED, 0, finished=False)
        gap = delta.offset + count > length and delta.offset != length
        if not gap:
            if delta.offset == length:
                self.stored[name] = self.stored.get(name, b"") + delta.tokens
            if delta.finish:
                self.finished[name] = delta.finish
        status = AppendStatus.GAP if gap else AppendStatus.STORED
        return AppendAck(attempt_id, status, self.length(name), name in self.finished)

    def assign(
        self,
        name: str,
        sampling: Sampling,
        *,
        attempt: str = "a1",
        policy: str = POLICY,
        interactive: bool = False,
        broken: types_pb2.Sampling | None = None,
        **bounds: Any,
    ) -> None:
        """Give a rollout out, with what is stored of it. `broken`: with this instead, which is no sampling."""
        self.fences[name] = f"{name}-{attempt}"
        partial = self.stored.setdefault(name, b"")
        assignment = fleet_pb2.Assignment(
            attempt=fleet_pb2.AttemptRef(run_id=RUN, rollout_id=name, attempt_id=self.fences[name]),
            policy=policy,
            prompt_ids=pack_ids(PROMPT),
            partial=partial,
            sampling=broken or to_proto(sampling, types_pb2.Sampling),
            interactive=interactive,
            **bounds,
        )
        self.say(assign=fleet_pb2.AssignBatch(assignments=[assignment]))

    def install(self, version: PolicyVersion, run_id: str = RUN, publisher: bytes = b"") -> None:
        message = to_proto(version, types_pb2.PolicyVersion)
        self.say(install=fleet_pb2.Install(version=message, run_id=run_id, publisher=publisher))

    def say(self, **message: Any) -> None:
        self._out.put_nowait(fleet_pb2.CoordinatorMessage(**message))

    def cancel(self, name: str) -> None:
        ref = fleet_pb2.AttemptRef(run_id=RUN, rollout_id=name, attempt_id=self.fences[name])
        self.say(cancel=fleet_pb2.CancelBatch(attempts=[ref]))

    def hang_up(self) -> None:
        """End the control stream."""
        self._out.put_nowait(None)

    def length(self, name: str) -> int:
        return len(self.stored.get(name, b"")) // TOKEN_BYTES

    def ids(self, name: str) -> list[int]:
        ids: list[int] = unpack_tokens(self.stored[name])["id"].tolist()
        return ids

    def versions(self, name: str) -> list[int]:
        versions: list[int] = unpack_tokens(self.stored[name])["version"].tolist()
        return versions

    def released(self) -> dict[str, str]:
        """What was handed back, and why in words."""
        return {ref.rollout_id: one.reason for one in self.heard.get("released", []) for ref in one.attempts}

    def causes(self) -> dict[str, EndCause]:
        return {ref.rollout_id: EndCause(one.cause) for one in self.heard.get("released", []) for ref in one.attempts}

    async def hear(self, kind: str, count: int = 1) -> Any:
        """The message number `count` of its kind, once it has come."""
        await wait_until(lambda: len(self.heard.get(kind, [])) >= count, what=f"{count} x {kind}")
        return self.heard[kind][count - 1]
