"""A worker that says and does what a test tells it, at a real coordinator."""

import asyncio
from typing import Any

import grpc

from ebbtide.append_stream import AppendAck, AppendDelta, AppendSender, acks
from ebbtide.rpc.channel import write
from ebbtide.rpc.status_table import translated
from ebbtide.types.fleet import PROTOCOL_VERSION, AttemptRef, EndCause
from ebbtide.types.rollout import FinishReason
from ebbtide.types.tokens import pack_tokens
from ebbtide.v1 import fleet_pb2, fleet_pb2_grpc, types_pb2
from ebbtide.wire import from_proto
from tests.support.waiting import wait_until


def tokens(start: int, count: int, version: int = 1) -> bytes:
    """Records whose ids say where they belong."""
    return pack_tokens(range(start, start + count), [-0.5] * count, version)


class ScriptedWorker:
    """Speaks both streams. It generates nothing by itself: a test appends, finishes, releases and breaks."""

    def __init__(self, channel: grpc.aio.Channel, worker_id: str, *, slots: int = 8, installs: bool = True) -> None:
        self._fleet: Any = fleet_pb2_grpc.FleetStub(channel)
        self.worker_id, self.slots, self.installs = worker_id, slots, installs
        self.assigned: dict[str, fleet_pb2.Assignment] = {}
        self.cancelled: list[str] = []
        self.installed: list[int] = []
        self.publishers: list[bytes] = []  # the keys that came with them
        self.drains: list[float] = []
        self.forgotten: list[str] = []
        self.asked: list[str] = []  # rollouts that it is to hand back
        self.borrows: list[fleet_pb2.Borrow] = []  # whether its host is to be borrowed, as it was told
        self.flush_intervals: list[float] = []  # the least, as it was told after its attach
        self.interactive_intervals: list[float] = []  # the same for interactive rollouts
        self.forecasts: dict[str, fleet_pb2.Forecasts.Forecast] = {}  # the last one of each attempt
        self._loops: list[asyncio.Task[None]] = []
        self.attached = fleet_pb2.Attached()
        self.ended: Exception | None = None
        self._sequence = 0
        self._sender = AppendSender()
        self.durable = False  # whether the last answer was
        self._reader: asyncio.Task[None] | None = None
        self._append: Any = None
        self._saying = asyncio.Lock()  # a stream takes one write at a time
        self.engine = fleet_pb2.EngineInfo(model="m", vocab_size=1000, max_model_len=256)

    async def attach(self, **more: Any) -> "ScriptedWorker":
        """Open both streams; `more` are further fields of Attach."""
        self._control: Any = self._fleet.Control()
        hello: dict[str, Any] = {
            "worker_id": self.worker_id, "kind": types_pb2.WORKER_KIND_SPOT, "protocol_version": PROTOCOL_VERSION,
            "slots": self.slots, "engine": self.engine,
        }  # fmt: skip
        with translated("coordinator"):
            await write(self._control, fleet_pb2.WorkerMessage(attach=fleet_pb2.Attach(**(hello | more))))
            first = await self._control.read()
        self.attached = first.attached
        self._reader = asyncio.create_task(self._read())
        await self.open_append()
        return self

    async def open_append(self) -> None:
        """A new append stream."""
        self._append = self._fleet.Append()
        self._sender = AppendSender()
        assert not (await self.exchange(self.message())).others

    async def _read(self) -> None:
        try:
            with translated("coordinator"):
                while (message := await self._control.read()) is not grpc.aio.EOF:
                    await self._take(message)
        except Exception as error:  # noqa: BLE001 - for the test to look at
            self.ended = error

    async def _take(self, message: fleet_pb2.CoordinatorMessage) -> None:
        for assignment in message.assign.assignments:
            self.assigned[assignment.attempt.rollout_id] = assignment
        over = [one.attempt for one in self.assigned.values() if one.attempt.run_id == message.forget.run_id]
        for ref in (*message.cancel.attempts, *over):
            self.cancelled.append(ref.rollout_id)
            self.assigned.pop(ref.rollout_id, None)
        self.asked += [ref.rollout_id for ref in message.release.attempts]
        self.forecasts |= {one.attempt_id: one for one in message.forecasts.forecasts}
        if message.HasField("borrow"):
            self.borrows.append(message.borrow)
        if message.HasField("forget"):
            self.forgotten.append(message.forget.run_id)
        if message.HasField("flush_interval"):
            self.flush_intervals.append(message.flush_interval.least_s)
            self.interactive_intervals.append(message.flush_interval.interactive_s)
        if message.HasField("drain"):
            self.drains.append(message.drain.deadline_s)
        if message.HasField("install"):
            self.installed.append(message.install.version.version)
            self.publishers.append(message.install.publisher)
            if self.installs:
                await self.say(
                    installed=fleet_pb2.Installed(version=message.install.version, run_id=message.install.run_id)
                )

    def beats(self, every_s: float = 0.1, **beat: Any) -> None:
        """Send heartbeats from now on."""

        async def beating() -> None:
            while True:
                await self.beat(**beat)
                await asyncio.sleep(every_s)

        self._loops.append(asyncio.create_task(beating()))

    async def beat(self, **beat: Any) -> None:
        await self.say(heartbeat=fleet_pb2.Heartbeat(**({"state": types_pb2.WORKER_STATE_READY} | beat)))

    async def hand_back(self, *rollout_ids: str, cause: int = EndCause.NOT_STATED, reason: str = "") -> None:
        refs = [self.assigned.pop(rollout_id).attempt for rollout_id in rollout_ids]
        released = fleet_pb2.Released(attempts=refs, reason=reason, cause=types_pb2.EndCause.ValueType(cause))
        await self.say(released=released)

    async def say(self, **kind: Any) -> None:
        async with self._saying:
            await write(self._control, fleet_pb2.WorkerMessage(**kind))

    async def send(self, *deltas: AppendDelta, session: str | None = None) -> list[AppendAck]:
        """Append, and the acknowledgements."""
        response = await self.exchange(self.message(*deltas, session=session))
        return acks(deltas, response)

    def message(self, *deltas: AppendDelta, session: str | None = None) -> fleet_pb2.AppendRequest:
        self._sequence += 1
        name = self.attached.session if session is None else session
        return self._sender.request(self._sequence, deltas, session=name)

    async def exchange(self, request: fleet_pb2.AppendRequest) -> fleet_pb2.AppendResponse:
        """Send one message, and its answer."""
        with translated("coordinator"):
            await write(self._append, request)
            response: Any = await self._append.read()
            while response is not grpc.aio.EOF and response.sequence < request.sequence:
                response = await self._append.read()  # an earlier message has become durable
            assert response is not grpc.aio.EOF, await self._append.code()
        assert response.sequence == request.sequence
        self.durable = response.durable
        answer: fleet_pb2.AppendResponse = response
        return answer

    def delta(self, rollout_id: str, offset: int, count: int, finish: int = 0) -> AppendDelta:
        ref = from_proto(self.assigned[rollout_id].attempt, AttemptRef)
        return AppendDelta(ref, offset, tokens(offset, count), FinishReason(finish) if finish else None)

    async def add(self, rollout_id: str, offset: int, count: int, finish: int = 0) -> AppendAck:
        (ack,) = await self.send(self.delta(rollout_id, offset, count, finish))
        return ack

    async def has(self, *rollout_ids: str) -> None:
        """Wait until all of these are assigned here."""
        await wait_until(lambda: set(rollout_ids) <= set(self.assigned), what=f"{rollout_ids} at {self.worker_id}")

    async def break_streams(self) -> None:
        """As if the process were gone."""
        for loop in self._loops:
            loop.cancel()
        for call in (self._control, self._append):
            call.cancel()
        tasks = [*self._loops, *([self._reader] if self._reader else [])]
        await asyncio.gather(*tasks, return_exceptions=True)
