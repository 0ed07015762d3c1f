"""A borrowed engine wakes when the guard wishes it awake, without a budget, which a sleeping engine does not get."""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ebbtide.auth.security import ServerSettings
from ebbtide.grants import page_path, socket_path
from ebbtide.rollout_worker.device_lease import DeviceLease
from ebbtide.rollout_worker.engine.vllm.borrowed_engine import BorrowedEngine
from ebbtide.rollout_worker.generation.local_attempts import GenerationHolds
from ebbtide.rollout_worker.guard_link import GuardLink, WeightSleep
from ebbtide.rpc.channel import open_socket
from ebbtide.rpc.server import Server
from ebbtide.serving_guard.borrowers import BorrowerTable
from ebbtide.serving_guard.lender import GrantIssuer, GrantStream
from ebbtide.serving_guard.memory_budget import MemoryBudget
from ebbtide.serving_guard.servicer import GRANTS, GrantServicer
from ebbtide.types.grants import Forecast, Residency
from ebbtide.v1.grants_pb2_grpc import GrantsStub, add_GrantsServicer_to_server
from tests.support.waiting import wait_until
from tests.unit.rollout_worker.installing import Worker, version

ROOT = Path(__file__).parents[3]
ENGINE = """
import os, sys
from pathlib import Path
from tests.integration.serving_guard.borrower import step_for_ever
step_for_ever(Path(sys.argv[1]), "w1", "fair", 0.005, os.getppid())
"""


class Sleeper:
    by_stages = True

    async def wake(self) -> None:
        pass

    async def give_up_cache(self) -> None:
        pass

    async def give_up_weights(self) -> None:
        pass

    async def release_cache(self) -> None:
        pass

    async def take_cache(self) -> None:
        pass


class Host:
    """A guard as it is, but for the traffic: its memory, its loans and its grants; and a worker with an engine whose
    weights are nothing but a version's number."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ahead_s = self._idle_s = 0.0
        self.memory = MemoryBudget(limit_mib=1, bytes_per_token=1024)
        self.borrowers = BorrowerTable(folder, self.memory, clock=self.now)
        self.issuer = GrantIssuer(
            self.borrowers,
            memory=lambda loan: self.memory.allowed(self.now(), loan.worker_id, idle_s=self._idle_s),
            forecast=Forecast,
            clock=self.now,
        )
        self.pairs = BorrowedEngine(page_path(folder, "w1"), 64)
        attempts: Any = SimpleNamespace(holds=GenerationHolds(), running=0, tokens=0, flush=lambda: None)
        self._attempts = attempts
        self.borrowing: GuardLink
        self.lease: DeviceLease
        self.worker: Worker
        self.sleeping: WeightSleep

    def now(self) -> float:
        return time.monotonic() + self._ahead_s

    def pass_time(self, seconds: float) -> None:
        self._ahead_s += seconds

    def serve(self, tokens: int, idle_s: float) -> None:
        """So many tokens are inside the serving engine; for so long borrowing is expected to be possible."""
        self.memory.tokens_inside(self.now(), tokens)
        self._idle_s = idle_s

    async def start(self, stack: AsyncExitStack) -> None:
        servicer = GrantServicer(GrantStream(self.borrowers, self.issuer).serve, status=None)  # type: ignore[arg-type]
        adding = [(add_GrantsServicer_to_server, servicer, GRANTS)]
        server = Server(ServerSettings(listen=f"unix:{socket_path(self.folder)}"), adding, private=True)
        await server.start()
        stack.push_async_callback(server.stop, grace=0.0)
        self._start_engine(stack)
        await wait_until(lambda: self.pairs.page.steps().pid)
        found = socket_path(self.folder)
        stub = GrantsStub(await stack.enter_async_context(open_socket(found)))
        self.lease = DeviceLease(self.pairs.page)
        self.worker = Worker(self.lease)
        self.sleeping = WeightSleep(Sleeper(), self.worker.installer)  # type: ignore[arg-type]
        self.borrowing = GuardLink(
            stub, str(found), self.pairs, self.lease, self._attempts, self.sleeping, worker_id="w1", slots=8
        )
        for work in (self.borrowing.run(), self.borrowing.watch(), self.borrowing.move(), self.worker.installer.run()):
            stack.push_async_callback(_end, asyncio.create_task(work))

    def _start_engine(self, stack: AsyncExitStack) -> None:
        engine = subprocess.Popen([sys.executable, "-c", ENGINE, str(self.folder)], cwd=ROOT)
        stack.callback(engine.wait, 10)
        stack.callback(engine.kill)

    async def fall_asleep(self) -> None:
        """A version is served, and then memory is short for long."""
        self.worker.installer.set_target(version(1))
        await wait_until(lambda: self.worker.installer.current == version(1) and not self.worker.installer.busy)
        await wait_until(self.borrowers.all)
        self.serve(2000, idle_s=0.0)
        await wait_until(lambda: self.issuer.allowed(self.borrowers.all()[0]).kv_bytes == 0)
        self.pass_time(0.6)
        await wait_until(lambda: self._reported(Residency.AWAY), what="an engine that is away")

    def _reported(self, residency: Residency) -> bool:
        loan = self.borrowers.all()[0]
        return loan.report is not None and loan.report.residency is residency


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


@pytest.fixture
async def host(grant_dir: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Host]:
    host = Host(grant_dir)
    async with AsyncExitStack() as stack:
        # Nobody writes budgets here: the first install goes on without one.
        monkeypatch.setattr("ebbtide.rollout_worker.device_lease._PATIENCE_S", 0.05)
        await host.start(stack)
        await host.fall_asleep()
        monkeypatch.setattr("ebbtide.rollout_worker.device_lease._PATIENCE_S", 60.0)
        yield host


async def test_an_engine_whose_weights_are_away_wakes_without_a_budget_and_without_delay(host: Host) -> None:
    assert not host.pairs.page.budget().tokens
    host.pass_time(100.0)
    host.serve(0, idle_s=1000.0)
    await wait_until(lambda: host.sleeping.residency is Residency.AWAKE, 10.0)
    assert host.worker.made == [(1, True), (1, False)]
    assert 0 < host.sleeping.wake_away_s < 1.0
    await wait_until(lambda: host.borrowers.all()[0].granted(host.now()), what="a loan that may have a budget again")


async def test_an_engine_whose_guard_has_second_thoughts_during_the_pull_loads_nothing(host: Host) -> None:
    host.worker.looks.clear()
    host.worker.pulling.clear()
    host.pass_time(100.0)
    host.serve(0, idle_s=1000.0)
    await wait_until(lambda: host.worker.looks == ["pull"])
    host.serve(0, idle_s=0.0)
    await wait_until(lambda: not host.lease.may_wake())
    host.worker.pulling.set()
    await wait_until(lambda: host.worker.looks == ["pull", "locked"])
    assert host.worker.made == [(1, True)]
    assert host.borrowing.state.asleep
    host.serve(0, idle_s=1000.0)
    await wait_until(lambda: not host.borrowing.state.asleep)
    assert host.worker.made == [(1, True), (1, False)]
