"""Runs one program of a local cluster as a child process in its own session.

Invariant: a program whose first process is gone has no others: the rest of its group is killed before that process is
reaped, while its id cannot be reused. If the launcher dies, the kernel kills the first process of each program, and
programs with children end theirs.
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
    """A program of the local cluster could not be started, or ended too often; the message has the end of its log."""


class Program(Struct, frozen=True, kw_only=True):
    """Says how to start, await and end one program."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str]
    log: Path
    ready_file: Path | None = None  # JSON with the key `address`; the program is ready once it exists,
    ready: Callable[[], str | None] | None = None  # or once this returns an address
    stage: int = 0  # lower stages end first
    cores: tuple[int, ...] = ()  # of the program and all that it starts; empty: any
    boot_s: float = 60.0
    stop_s: float = 10.0


def tethered(*command: str) -> tuple[str, ...]:
    """Returns the command line that makes a foreign program die with this process."""
    return (sys.executable, "-m", "ebbtide.local_cluster.tether", str(os.getpid()), *command)


class ProgramProcess:
    """A started program; `address` is empty until it is ready."""

    def __init__(self, program: Program) -> None:
        """Starts the program. Call it from the main thread: the kernel ties the program to the calling thread."""
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
        if program.cores:  # before it has threads, which would keep their own
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(self._popen.pid, program.cores)

    @property
    def name(self) -> str:
        return self.program.name

    @property
    def pid(self) -> int:
        """Id of the first process, and of its session and group."""
        return self._popen.pid

    def running(self) -> bool:
        """Whether the first process lives. If not, its group is gone when this returns."""
        if self.returncode is None:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                self._signal_group(signal.SIGKILL)
                self.returncode = self._popen.wait()
        return self.returncode is None

    async def wait_ready(self) -> None:
        """Raises `LaunchFailed` with the end of the log if the program ends before, or is not ready in `boot_s`."""
        end = self.started + self.program.boot_s
        while not (address := self._ready()):
            if not self.running():
                raise LaunchFailed(f"{self.name} ended with {self.status} before it was ready{self.tail()}")
            if time.monotonic() > end:
                raise LaunchFailed(f"{self.name} was not ready in {self.program.boot_s:.0f} s{self.tail()}")
            await asyncio.sleep(_TICK_S)
        self.address = address

    async def stop(self, within_s: float | None = None) -> None:
        """Terminates the first process; kills the whole group after `within_s`, by default the program's `stop_s`.

        A program that is not ready may ignore signals, and has nothing to hand over, so it gets less time.
        """
        if self.running():
            os.kill(self.pid, signal.SIGTERM)
        asked, stop_s = time.monotonic(), self.program.stop_s if within_s is None else within_s
        while self.running():
            if not self.address and self.program.ready_file:
                self.address = self._ready() or ""  # `wait_ready` may have ended before it was ready
            if time.monotonic() > asked + (stop_s if self.address else min(_NOT_READY_S, stop_s)):
                break
            await asyncio.sleep(_TICK_S)
        self.kill()

    def kill(self) -> None:
        """Kills the whole group, and waits until the first process is gone."""
        if self.running():
            self._signal_group(signal.SIGKILL)
            self.returncode = self._popen.wait()

    @property
    def status(self) -> str:
        """Says how the program ended, for people."""
        code = self.returncode
        return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"status {code}"

    def tail(self) -> str:
        """Returns the log's path, and on further lines the end of what this start of the program wrote."""
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
