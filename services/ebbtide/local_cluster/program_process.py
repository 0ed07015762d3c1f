"""One program of a local cluster, as a child process in a session of its own.

Invariant: a program whose first process is gone has no others: whoever notices the end kills the rest of its group
before that process is reaped, while its id can belong to nobody else. When the launcher dies here, the kernel kills the
first process of each program, and programs with children see to theirs.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from msgspec import Struct

from ebbtide.errors import EbbtideError

_TICK_S: Final = 0.05
_TAIL_LINES: Final = 15
_NOT_READY_S: Final = 1.0


class LaunchFailed(EbbtideError):
    """A program of the local cluster could not be started, or ended too often. Bears the end of its log."""


class Program(Struct, frozen=True, kw_only=True):
    """How to start, await and end one program. `stage`: those with lower ones are ended first.

    It is ready once `ready_file` (JSON with the key `address`) exists, or `ready` returns an address.
    """

    name: str
    command: tuple[str, ...]
    environment: dict[str, str]
    log: Path
    ready_file: Path | None = None
    ready: Callable[[], str | None] | None = None
    stage: int = 0
    boot_s: float = 60.0
    stop_s: float = 10.0


def tethered(*command: str) -> tuple[str, ...]:
    """The command line by which a foreign program dies with this process."""
    return (sys.executable, "-m", "ebbtide.local_cluster.tether", str(os.getpid()), *command)


class ProgramProcess:
    """A started program; `address` is set once it is ready."""

    def __init__(self, program: Program) -> None:
        """Starts it. From the main thread only: the kernel ties it to the thread that it was started from."""
        self.program = program
        self.address = ""
        self.started = time.monotonic()
        self.returncode: int | None = None
        if program.ready_file:
            program.ready_file.unlink(missing_ok=True)
        with program.log.open("ab") as out:
            self._log_start = out.tell()
            self._popen = subprocess.Popen(
                program.command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=program.environment,
                start_new_session=True,
            )

    @property
    def name(self) -> str:
        return self.program.name

    @property
    def pid(self) -> int:
        """Of the first process, and of its session and group."""
        return self._popen.pid

    def running(self) -> bool:
        """Whether the first process lives; if not, neither does its group when this returns."""
        if self.returncode is None:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                self._signal_group(signal.SIGKILL)
                self.returncode = self._popen.wait()
        return self.returncode is None

    async def wait_ready(self) -> None:
        """Raises `LaunchFailed` with the end of the log if it ends before, or takes longer than it may."""
        end = self.started + self.program.boot_s
        while not (address := self._ready()):
            if not self.running():
                raise LaunchFailed(f"{self.name} ended with {self.status} before it was ready{self.tail()}")
            if time.monotonic() > end:
                raise LaunchFailed(f"{self.name} was not ready in {self.program.boot_s:.0f} s{self.tail()}")
            await asyncio.sleep(_TICK_S)
        self.address = address

    async def stop(self) -> None:
        """SIGTERM to the first process, SIGKILL to the whole group if it takes longer than it may.

        One that is not ready yet may be deaf, and has nothing to hand over.
        """
        if self.running():
            os.kill(self.pid, signal.SIGTERM)
        asked, stop_s = time.monotonic(), self.program.stop_s
        while self.running():
            if not self.address and self.program.ready_file:
                self.address = self._ready() or ""  # who waited for it may have given up before it was
            if time.monotonic() > asked + (stop_s if self.address else min(_NOT_READY_S, stop_s)):
                break
            await asyncio.sleep(_TICK_S)
        self.kill()

    def kill(self) -> None:
        """SIGKILL to the whole group, and wait until the first process is gone."""
        if self.running():
            self._signal_group(signal.SIGKILL)
            self.returncode = self._popen.wait()

    @property
    def status(self) -> str:
        """How it ended, for people."""
        code = self.returncode
        return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"status {code}"

    def tail(self) -> str:
        """The end of what this start of it wrote to its log, on lines of their own, headed by the log's path."""
        with self.program.log.open("rb") as log:
            log.seek(self._log_start)
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join([f"; the end of {self.program.log}:", *lines[-_TAIL_LINES:]])

    def _ready(self) -> str | None:
        if self.program.ready:
            return self.program.ready()
        if self.program.ready_file and self.program.ready_file.exists():
            address: str = json.loads(self.program.ready_file.read_text())["address"]
            return address
        return None

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # all members are gone already
            os.killpg(self.pid, number)
