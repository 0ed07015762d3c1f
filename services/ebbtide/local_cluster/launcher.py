"""Starts the programs of one cluster on this machine in order, watches them, restarts them, and ends them.

Invariant: every process below this one is in `_processes`, or is an orphan of one: this process adopts orphans as a
subreaper, so that none escapes. Only this module writes `_processes`. If this process dies, the kernel kills all of
them (see `ebbtide.local_cluster.program_process`).
"""

import asyncio
import contextlib
import ctypes
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from itertools import groupby
from typing import Any, Final, TypeVar

import psutil

from ebbtide.local_cluster.program_process import LaunchFailed, Program, ProgramProcess

T = TypeVar("T")

_PR_SET_CHILD_SUBREAPER: Final = 36
_TICK_S: Final = 0.1
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
            await asyncio.sleep(_TICK_S)
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
                await asyncio.sleep(_TICK_S)
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
