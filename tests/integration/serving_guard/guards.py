"""Runs a serving-guard as a process, and reads its status."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from ebbtide.grants import socket_path
from ebbtide.rpc.channel import open_socket
from ebbtide.types.grants import GuardStatus
from ebbtide.v1 import grants_pb2 as pb
from ebbtide.v1.grants_pb2_grpc import GrantsStub
from ebbtide.wire import from_proto
from tests.support.waiting import wait_until


class GuardProcess:
    """A guard's process. `url` is for users' requests, once `ready`."""

    def __init__(
        self, folder: Path, upstream: str, environment: Mapping[str, str] | None = None, **settings: object
    ) -> None:
        self.folder = folder
        self._ready = folder.parent / f"{folder.name}-guard.json"
        self._ready.unlink(missing_ok=True)
        given = {
            "listen": "127.0.0.1:0",
            "upstream": upstream,
            "grant_dir": folder,
            "ready_file": self._ready,
            "die_with_parent": os.getpid(),
            **settings,
        }
        flags = [text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", str(value))]
        self.process = subprocess.Popen([sys.executable, "-m", "ebbtide.serving_guard", *flags], env=environment)
        self.url = ""

    async def ready(self) -> None:
        await wait_until(lambda: self._ready.exists() or self.process.poll() is not None, 20)
        assert self.process.poll() is None
        self.url = f"http://{json.loads(self._ready.read_text())['address']}"

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)

    async def status(self) -> GuardStatus:
        return await status(self.folder)


@contextlib.contextmanager
def guard_process(
    folder: Path, upstream: str, environment: Mapping[str, str] | None = None, **settings: object
) -> Iterator[GuardProcess]:
    guard = GuardProcess(folder, upstream, environment, **settings)
    try:
        yield guard
    finally:
        guard.close()


async def status(folder: Path) -> GuardStatus:
    """The status of the guard in that folder."""
    async with open_socket(socket_path(folder)) as channel:
        async for message in GrantsStub(channel).WatchGuard(pb.WatchGuardRequest(), timeout=3):
            return from_proto(message, GuardStatus)
    raise AssertionError("no status")
