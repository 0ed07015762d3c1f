"""Runs the guard of a trainer's device and the owner of that device as processes, and reads the device's status."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ebbtide.free_ports import free_port
from ebbtide.grants import socket_path
from ebbtide.rpc.channel import open_socket
from ebbtide.types.grants import DeviceStatus
from ebbtide.v1.loans_pb2 import WatchDeviceRequest
from ebbtide.v1.loans_pb2_grpc import LoansStub
from ebbtide.wire import from_proto
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[3]
#: Takes the device back, says so, and waits for its end.
OWNER = """
import asyncio, sys
from pathlib import Path
from ebbtide import telemetry
from ebbtide.trainer.lending.device_loan import DeviceLoan

async def own(folder, run_id, lease):
    loan = DeviceLoan(Path(folder), run_id=run_id, lease=int(lease))
    running = asyncio.create_task(loan.run())
    await loan.take_back()
    print("taken", flush=True)
    await running

telemetry.configure("owner")
asyncio.run(own(*sys.argv[1:]))
"""

#: One of a trainer's ranks, each on a host of its own: it takes all devices back, or follows rank 0.
RANK = """
import asyncio, os, sys
from pathlib import Path
from torch.distributed import TCPStore
from ebbtide import telemetry
from ebbtide.trainer.lending.shared_loan import tell_places
from ebbtide.trainer.lending.shared_loan import LoanFollower
from ebbtide.trainer.lending.shared_loan import LendingRanks, SharedLoan
from ebbtide.trainer.ranks.rank_world import RankBoard

async def rank(number, folder, lease):
    if not number:
        store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=True, wait_for_workers=False)
    board = RankBoard()
    leaders = await tell_places(board, number, 2, folder)
    if number:
        await LoanFollower(Path(folder), board, number).run()
    loan = SharedLoan(Path(folder), LendingRanks(board, leaders), run_id="r", lease=lease)
    running = asyncio.create_task(loan.run())
    await loan.take_back()
    print("taken", flush=True)
    await running

telemetry.configure("rank")
asyncio.run(rank(int(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
"""


#: The guard in the mode of a trainer's device.
PROGRAM = ("ebbtide.serving_guard", "--owner", "trainer")


class TrainerGuardProcess:
    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None, **settings: object) -> None:
        self.folder, self._settings, self._environment = folder, settings, environment
        self._ready = folder.parent / "trainer-guard.json"
        self.process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        self._ready.unlink(missing_ok=True)
        given = {
            "grant_dir": self.folder,
            "ready_file": self._ready,
            "die_with_parent": os.getpid(),
            **self._settings,
        }
        flags = [text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", str(value))]
        return subprocess.Popen([sys.executable, "-m", *PROGRAM, *flags], env=self._environment)

    async def ready(self) -> None:
        await wait_until(lambda: self._ready.exists() or self.process.poll() is not None, 20)
        assert self.process.poll() is None
        assert json.loads(self._ready.read_text())["address"].startswith("unix:")

    async def start_again(self) -> None:
        self.process = self._started()
        await self.ready()

    def end(self, how: signal.Signals = signal.SIGKILL) -> int:
        self.process.send_signal(how)
        return self.process.wait(10)

    async def status(self) -> DeviceStatus:
        async with open_socket(socket_path(self.folder)) as channel:
            async for message in LoansStub(channel).WatchDevice(WatchDeviceRequest(), timeout=3):
                return from_proto(message, DeviceStatus)
        raise AssertionError("no status")


@contextlib.contextmanager
def trainer_guard_process(
    folder: Path,
    *,
    environment: Mapping[str, str] | None = None,
    **settings: object,
) -> Iterator[TrainerGuardProcess]:
    guard = TrainerGuardProcess(folder, environment, **settings)
    try:
        yield guard
    finally:
        guard.end()


@contextlib.contextmanager
def owner_process(
    folder: Path, *, run_id: str = "r", lease: int = 1, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A trainer that has taken the device back, once it has said so."""
    command = [sys.executable, "-c", OWNER, str(folder), run_id, str(lease)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, env=environment) as owner:
        try:
            assert owner.stdout
            assert owner.stdout.readline() == b"taken\n"
            yield owner
        finally:
            owner.kill()


@contextlib.contextmanager
def rank_processes(folders: Sequence[Path], *, lease: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The ranks of a trainer that has taken the devices of all its hosts back."""
    meeting = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = []
    try:
        for number, folder in enumerate(folders):
            command = [sys.executable, "-c", RANK, str(number), str(folder), str(lease)]
            ranks.append(subprocess.Popen(command, cwd=ROOT, env=meeting, stdout=subprocess.PIPE))
        assert ranks[0].stdout
        assert ranks[0].stdout.readline() == b"taken\n"
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
