"""A coordinator and a relay that can be made to misbehave, on real gRPC, and workers attached to them."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY

from ebbtide.auth.security import ClientSecurity, ServerSettings
from ebbtide.errors import NotFound, StoreUnavailable
from ebbtide.ledger import read_ledger
from ebbtide.rollout_worker.engine.scripted_engine import follow
from ebbtide.rollout_worker.service import serve
from ebbtide.rollout_worker.settings import ScriptedSettings, WorkerSettings
from ebbtide.rpc.server import Server
from ebbtide.runtime import Shutdown
from ebbtide.testing import wait_until
from ebbtide.types.append_delta import AppendAck, AppendDelta
from ebbtide.types.end_cause import EndCause
from ebbtide.types.fleet import PROTOCOL_VERSION, AppendStatus
from ebbtide.types.run import Sampling
from ebbtide.types.tokens import TOKEN_BYTES, pack_ids, unpack_tokens
from ebbtide.types.weights import PolicyVersion
from ebbtide.v1 import fleet_pb2, fleet_pb2_grpc, types_pb2, weights_pb2_grpc
from ebbtide.wire.append_columns import AppendReceiver, answer
from ebbtide.wire.record_conversion import to_proto
from tests.integration.rollout_worker.reading import Reads, watch_reads
from tests.integration.rollout_worker.relays import POLICY, RUN, TOKEN, LiveRelay, Relay

PROMPT = (40, 41, 42)
FLUSH_TOKENS = 16


class Coordinator(fleet_pb2_grpc.FleetServicer):
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
            deltas = receiver.deltas(request)
            acks = [self._append(delta) for delta in deltas]
            self.messages += bool(acks)
            if self.lossy and acks:
                self.lossy = False
                raise StoreUnavailable("the store went away with the acknowledgement")
            yield answer(request.sequence, deltas, acks, durable=self.durable)

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
        broken: types_pb2.Sampling | None = None,
        **bounds: int,
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
        """What was handed back, with the words by which a coordinator of the former release knows why."""
        return {ref.rollout_id: one.reason for one in self.heard.get("released", []) for ref in one.attempts}

    def causes(self) -> dict[str, EndCause]:
        return {ref.rollout_id: EndCause(one.cause) for one in self.heard.get("released", []) for ref in one.attempts}

    async def hear(self, kind: str, count: int = 1) -> Any:
        """The message number `count` of its kind, once it has come."""
        await wait_until(lambda: len(self.heard.get(kind, [])) >= count, what=f"{count} x {kind}")
        return self.heard[kind][count - 1]


class WorkerTask:
    """A worker in this process."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.shutdown = Shutdown("rollout-worker", settings)
        self.task = asyncio.create_task(serve(self.shutdown, settings))

    async def end(self) -> None:
        """Ask it to end, and wait; raises what it raises."""
        self.shutdown.requested.set()
        try:
            await self.task
        finally:
            await self.shutdown.close()


class House:
    """Coordinator and relay, and what starts workers for them."""

    def __init__(
        self, name: str, coordinator: Coordinator, relay: Relay, addresses: tuple[str, str], tmp_path: Path
    ) -> None:
        self.name, self.coordinator, self.relay, self._addresses = name, coordinator, relay, addresses
        self._workers: list[WorkerTask] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self.counter_file, self.mirrors = tmp_path / f"{name}.ledger", tmp_path / "mirrors"

    def settings(self, **changes: Any) -> WorkerSettings:
        scripted = ScriptedSettings(**{"step_s": 0.002, **changes.pop("scripted", {})})
        base = WorkerSettings(
            coordinator=self._addresses[0],
            relay=self._addresses[1],
            client=ClientSecurity(token=TOKEN),
            worker_id=self.name,
            engine="scripted",
            mirror_dir=str(self.mirrors),
            flush_tokens=FLUSH_TOKENS,
            flush_interval_ms=20,
            pull_patience_s=5.0,
            drain_timeout_s=5.0,
            counter_file=str(self.counter_file),
            scripted=scripted,
        )
        return msgspec.structs.replace(base, **changes)

    async def worker(self, *, version: int = 1, **changes: Any) -> WorkerTask:
        """An attached worker that serves `version`; 0: none yet."""
        worker = WorkerTask(self.settings(**changes))
        self._workers.append(worker)
        await wait_until(lambda: self.coordinator.attaches or worker.task.done(), what="an attach")
        if version:
            self.coordinator.install(self.relay.publish(version))
            await self.coordinator.hear("installed")
        return worker

    async def process(self, *flags: str, version: int = 1) -> subprocess.Popen[bytes]:
        """An attached worker as a process of its own, which serves `version`; 0: none yet."""
        command = [sys.executable, "-m", "ebbtide.rollout_worker", "--engine", "scripted", "--worker-id", self.name]
        command += ["--coordinator", self._addresses[0], "--relay", self._addresses[1]]
        command += ["--flush-tokens", str(FLUSH_TOKENS), "--flush-interval-ms", "20"]
        command += ["--counter-file", str(self.counter_file), "--mirror-dir", str(self.mirrors), *flags]
        attaches = len(self.coordinator.attaches)
        process = subprocess.Popen(command, env={**os.environ, "EBBTIDE_TOKEN": TOKEN}, stdout=subprocess.DEVNULL)  # noqa: ASYNC220
        self._processes.append(process)
        await wait_until(
            lambda: len(self.coordinator.attaches) > attaches or process.poll() is not None, 30, what="an attach"
        )
        if version:
            self.coordinator.install(self.relay.publish(version))
            await self.coordinator.hear("installed")
        return process

    def in_engine(self) -> float | None:
        """Rollouts in the engine at the last heartbeat."""
        return REGISTRY.get_sample_value("ebbtide_worker_running")

    def generated(self) -> int:
        """Tokens that left the engine."""
        return sum(record.generated for record in read_ledger(self.counter_file))

    async def hold_store(self, name: str) -> None:
        """Stop the store in the midst of rollout `name`, with tokens on their way to it."""
        await wait_until(lambda: self.coordinator.length(name) > 4)
        self.coordinator.store_up.clear()
        await wait_until(lambda: self.generated() > self.coordinator.length(name) + 8)

    async def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait(10)
        self.coordinator.store_up.set()
        for worker in self._workers:
            worker.task.cancel()
            await asyncio.gather(worker.task, return_exceptions=True)
            await worker.shutdown.close()


Make = Callable[[str], Awaitable[House]]


@pytest.fixture
async def houses(tmp_path: Path) -> AsyncIterator[Make]:
    """Makes a coordinator for the worker of each name, all with one relay."""
    async with AsyncExitStack() as stack:
        relay = Relay()
        add = weights_pb2_grpc.add_WeightsServicer_to_server
        target = await _serve(stack, add, relay, "ebbtide.v1.Weights")

        async def make(name: str) -> House:
            coordinator = Coordinator()
            address = await _serve(stack, fleet_pb2_grpc.add_FleetServicer_to_server, coordinator, "ebbtide.v1.Fleet")
            made = House(name, coordinator, relay, (address, target), tmp_path)
            stack.push_async_callback(made.close)
            return made

        yield make


@pytest.fixture
async def house(houses: Make) -> House:
    return await houses("w1")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """What engines read at their installs."""
    return watch_reads(monkeypatch)


@pytest.fixture
async def live(tmp_path: Path) -> AsyncIterator[LiveRelay]:
    """A real relay."""
    relay = LiveRelay(tmp_path / "relay")
    await relay.start()
    yield relay
    await relay.stop()


async def _serve(stack: AsyncExitStack, add: Callable[..., None], servicer: Any, name: str) -> str:
    server = Server(ServerSettings(listen="127.0.0.1:0", token=TOKEN), [(add, servicer, name)])
    await server.start()
    await server.set_serving(True)
    stop: Callable[[], Awaitable[None]] = lambda: server.stop(grace=0.0)  # noqa: E731
    stack.push_async_callback(stop)
    return server.address


@pytest.fixture
def expected() -> Callable[[int], list[int]]:
    """The first so many tokens of a response to PROMPT."""
    return lambda count: [token for token, _ in follow(ScriptedSettings(), PROMPT, count)]
