"""Runs a device-arbiter and the owner of its device as processes, and reads the device's status."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from ebbtide.grants import socket_path
from ebbtide.rpc.channel import open_socket
from ebbtide.testing import wait_until
from ebbtide.types.loans import DeviceStatus
from ebbtide.v1.loans_pb2 import WatchDeviceRequest
from ebbtide.v1.loans_pb2_grpc import LoansStub
from ebbtide.wire.record_conversion import from_proto

ROOT = Path(__file__).parents[3]
#: Takes the device back, says so, and waits for its end.
OWNER = """
import asyncio, sys
from pathlib import Path
from ebbtide import telemetry
from ebbtide.trainer.device_loan import DeviceLoan

async def own(folder, run_id, lease):
    loan = DeviceLoan(Path(folder), run_id=run_id, lease=int(lease))
    running = asyncio.create_task(loan.run())
    await loan.take_back()
    print("taken", flush=True)
    await running

telemetry.configure("owner")
asyncio.run(own(*sys.argv[1:]))
"""


class ArbiterProcess:
    def __init__(self, folder: Path, **settings: object) -> None:
        self.folder, self._settings = folder, settings
        self._ready = folder.parent / "arbiter.json"
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
        return subprocess.Popen([sys.executable, "-m", "ebbtide.device_arbiter", *flags])

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
def arbiter_process(folder: Path, **settings: object) -> Iterator[ArbiterProcess]:
    arbiter = ArbiterProcess(folder, **settings)
    try:
        yield arbiter
    finally:
        arbiter.end()


@contextlib.contextmanager
def owner_process(folder: Path, *, run_id: str = "r", lease: int = 1) -> Iterator[subprocess.Popen[bytes]]:
    """A trainer that has taken the device back, once it has said so."""
    command = [sys.executable, "-c", OWNER, str(folder), run_id, str(lease)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as owner:
        try:
            assert owner.stdout
            assert owner.stdout.readline() == b"taken\n"
            yield owner
        finally:
            owner.kill()
