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
from ebbtide.ledger import read_ledger
from ebbtide.rollout_worker.service import serve
from ebbtide.rollout_worker.settings import WorkerSettings
from ebbtide.rpc.server import Server
from ebbtide.runtime import Shutdown
from ebbtide.v1 import fleet_pb2_grpc, weights_pb2_grpc
from tests.fakes.scripted_engine import follow
from tests.fakes.scripted_fleet import PROMPT, ScriptedFleet
from tests.fakes.scripted_relay import TOKEN, LiveRelay, Relay
from tests.fakes.scripted_settings import ENGINE, ScriptedSettings, write_script
from tests.integration.rollout_worker.reading import Reads, watch_reads
from tests.support.waiting import wait_until

FLUSH_TOKENS = 16


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
        self, name: str, coordinator: ScriptedFleet, relay: Relay, addresses: tuple[str, str], tmp_path: Path
    ) -> None:
        self.name, self.coordinator, self.relay, self._addresses = name, coordinator, relay, addresses
        self._workers: list[WorkerTask] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self.counter_file, self.mirrors = tmp_path / f"{name}.ledger", tmp_path / "mirrors"

    def settings(self, **changes: Any) -> WorkerSettings:
        script = ScriptedSettings(**{"step_s": 0.002, **changes.pop("script", {})})
        base = WorkerSettings(
            coordinator=self._addresses[0],
            relay=self._addresses[1],
            client=ClientSecurity(token=TOKEN),
            worker_id=self.name,
            engine=ENGINE,
            engine_options=write_script(script),
            mirror_dir=str(self.mirrors),
            flush_tokens=FLUSH_TOKENS,
            flush_interval_ms=20,
            pull_patience_s=5.0,
            drain_timeout_s=5.0,
            counter_file=str(self.counter_file),
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
        command = [sys.executable, "-m", "ebbtide.rollout_worker", "--engine", ENGINE, "--worker-id", self.name]
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
        """Stop the store in the middle of rollout `name`, with tokens on their way to it."""
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
            coordinator = ScriptedFleet()
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
