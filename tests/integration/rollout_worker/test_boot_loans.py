"""A borrowed engine on a GPU boots only while its device is lent and has room, and its guard knows of it from before.

The guard is one of a trainer as it is, but for the GPU and for the trainer, of which only the wish is left.
"""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ebbtide.auth.security import ServerSettings
from ebbtide.errors import InvalidRequest
from ebbtide.grants import page_path, socket_path
from ebbtide.rollout_worker.boot_loan import BootLoan
from ebbtide.rollout_worker.engine.vllm.borrowed_engine import BorrowedEngine
from ebbtide.rpc.channel import open_socket
from ebbtide.rpc.server import Server
from ebbtide.serving_guard import borrower_processes
from ebbtide.serving_guard.borrower_processes import BorrowerProcess
from ebbtide.serving_guard.borrowers import BorrowerTable, Loan
from ebbtide.serving_guard.lender import GrantIssuer, GrantStream
from ebbtide.serving_guard.loan_keeper import LoanKeeper, ReturnWatch
from ebbtide.serving_guard.servicer import GRANTS, GrantServicer
from ebbtide.serving_guard.trainer_lender import PhasedMemory
from ebbtide.types.grants import Residency
from ebbtide.v1.grants_pb2_grpc import GrantsStub, add_GrantsServicer_to_server
from tests.support.waiting import wait_until

MIB = 1 << 20
NEEDED = 150 * MIB


class Host:
    """A guard whose trainer lends or does not (`lent`), a GPU with `free` bytes, and a worker that is to boot."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lent, self.free = folder, False, 1000 * MIB
        self._stack = AsyncExitStack()
        gpu: Any = SimpleNamespace(memory=lambda: (self.free, 1000 * MIB))
        self.memory = PhasedMemory(Residency.AWAY, lambda: self.keeper.granting, device=lambda _: gpu)
        self.borrowers = BorrowerTable(folder, self.memory)
        ownership: Any = SimpleNamespace(
            lends=lambda _: self.lent, state=lambda _: "lent" if self.lent else "held", owner=None
        )
        returns = ReturnWatch(folder, self.borrowers, Residency.AWAY)
        self.keeper = LoanKeeper(ownership, self.borrowers, returns, memory_s=60.0)
        self.engine = BorrowedEngine(page_path(folder, "w1"), 64)
        self.engine.weights_bytes, self.engine.kv_bytes, self.engine.device = 50 * MIB, 100 * MIB, "GPU-1"

    async def start(self) -> None:
        issuer = GrantIssuer(self.borrowers, memory=self.memory.allowed, forecast=self.keeper.forecast)
        servicer = GrantServicer(GrantStream(self.borrowers, issuer).serve, status=None)  # type: ignore[arg-type]
        adding = [(add_GrantsServicer_to_server, servicer, GRANTS)]
        server = Server(ServerSettings(listen=f"unix:{socket_path(self.folder)}"), adding, private=True)
        await server.start()
        self._stack.push_async_callback(server.stop, 0.0)
        self._spawn(self.keeper.run())

    async def announce(self) -> tuple["asyncio.Task[None]", "asyncio.Task[None]"]:
        """Tasks of a new announcement: its stream, and its wait for the permission."""
        channel = await self._stack.enter_async_context(open_socket(socket_path(self.folder)))
        boot = BootLoan(GrantsStub(channel), "the guard", self.engine, worker_id="w1")
        return self._spawn(boot.run()), self._spawn(boot.permission())

    def _spawn(self, work: Any) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)

        async def end() -> None:
            task.cancel()
            await asyncio.wait({task})

        self._stack.push_async_callback(end)
        return task

    @property
    def loan(self) -> Loan | None:
        return next(iter(self.borrowers.all()), None)

    async def more_grants(self) -> None:
        """Wait until the worker has had some since now."""
        loan = self.loan
        assert loan is not None
        issued = loan.issued
        await wait_until(lambda: loan.issued >= issued + 3)

    async def close(self) -> None:
        await self._stack.aclose()
        self.engine.close()


@pytest.fixture
def worker_process(monkeypatch: pytest.MonkeyPatch) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that stands for the worker's: this one is the guard's, which takes no Hello with its own."""
    process = subprocess.Popen(["sleep", "300"])
    found = borrower_processes._find(process.pid)
    assert found is not None

    def checked(pids: Iterable[int], _: Path) -> tuple[BorrowerProcess, ...]:
        if not all(pids):
            raise InvalidRequest("is no process", field="pids")  # of a page that no engine has written yet
        return (found,)

    monkeypatch.setattr(borrower_processes, "checked", checked)
    yield process
    process.kill()
    process.wait()


@pytest.fixture
async def host(tmp_path: Path, worker_process: object) -> AsyncIterator[Host]:
    made = Host(tmp_path)
    await made.start()
    yield made
    await made.close()


async def test_an_engine_boots_once_the_device_is_lent_and_has_room(host: Host) -> None:
    _, permission = await host.announce()
    await wait_until(lambda: host.memory.engine_bytes() == NEEDED, what="the trainer is told before the boot")
    await host.more_grants()
    assert not permission.done(), "the trainer has its device"
    host.lent, host.free = True, NEEDED
    await wait_until(lambda: host.keeper.granting)
    await host.more_grants()
    assert not permission.done(), "the trainer still moves out"
    host.free = 1000 * MIB
    await asyncio.wait_for(permission, 30.0)


async def test_a_take_back_waits_for_an_engine_that_boots_and_for_its_process(
    host: Host, worker_process: "subprocess.Popen[bytes]"
) -> None:
    host.lent = True
    announcing, permission = await host.announce()
    await asyncio.wait_for(permission, 30.0)
    await wait_until(lambda: host.loan is not None and host.loan.boots)
    host.lent = False
    await wait_until(lambda: not host.keeper.granting)
    await wait_until(lambda: host.keeper.back.waits_for == "the memory of w1")
    assert not host.keeper.back.memory
    announcing.cancel()
    worker_process.kill()
    worker_process.wait()
    await wait_until(lambda: host.keeper.back.memory)


async def test_a_worker_that_begins_again_announces_itself_again(host: Host) -> None:
    announcing, permission = await host.announce()
    await wait_until(lambda: host.memory.engine_bytes() == NEEDED)
    announcing.cancel()
    permission.cancel()
    await wait_until(lambda: host.memory.engine_bytes() == 0)
    _, permission = await host.announce()
    await wait_until(lambda: host.memory.engine_bytes() == NEEDED)
    host.lent = True
    await asyncio.wait_for(permission, 30.0)
