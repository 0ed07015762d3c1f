"""Runs a service process: event loop, signals, background tasks, readiness, exit code.

Invariant: a process either works or ends, and it ends as a whole. SIGTERM or SIGINT asks it to end, a second one ends
it at once; a crashed background task ends it, too. A dead process leaves only its ready file, which the next start
replaces.

Exit codes: 0 ended when asked, 1 failed (the last log line says why), 2 bad settings, 130 second signal.
"""

import asyncio
import contextlib
import contextvars
import ctypes
import json
import logging
import os
import queue
import resource
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NoReturn, TypeVar

import uvloop
from msgspec import Meta, Struct

from ebbtide import telemetry
from ebbtide.errors import EbbtideError

log = telemetry.get_logger(__name__)
T = TypeVar("T")

_expires = telemetry.gauge(
    "credentials_expire_timestamp_seconds",
    "Unix time at which the first credential of its kind in this program's files ends; `kind`: certificate, "
    "authority, token (signed)",
    ("kind",),
)
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_DUMPABLE: Final = 4
#: After a crash, the main function may take this long to end by itself.
_CRASH_GRACE_S: Final = 10.0


class ProcessSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of every service process. Services' settings inherit them."""

    log_level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="minimum log level")] = "info"
    metrics_port: Annotated[
        int, Meta(ge=-1, le=65535, description="port of the Prometheus metrics; 0 picks a free port, -1 disables them")
    ] = -1
    metrics_host: Annotated[
        str,
        Meta(
            description="address to bind the Prometheus port to; whoever reaches it can read the metrics, without TLS"
        ),
    ] = "127.0.0.1"
    ready_file: Annotated[str, Meta(description="file to write once ready, JSON with address, metrics and pid")] = ""
    die_with_parent: Annotated[
        int, Meta(ge=0, description="pid of the parent process; its death kills this one; 0 for none")
    ] = 0


class Shutdown:
    """Gives a running service control of its process."""

    def __init__(self, name: str, settings: ProcessSettings) -> None:
        self.requested = asyncio.Event()
        self.name = name
        self.failure: BaseException | None = None
        self._settings = settings
        self._tasks: set[asyncio.Task[None]] = set()
        self._metrics: telemetry.MetricsServer | None = None

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `work` beside the main function, until the process ends. If it raises, the process ends."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def fail(self, error: BaseException, task: str = "main") -> None:
        """End the process with exit code 1. Only the first failure is logged."""
        if self.failure is None:
            self.failure = error
            log_failure(error, task)
        self.requested.set()

    def ready(self, address: str) -> None:
        """Announce on stdout and in the ready file that the service is ready at `address`."""
        metrics = self._metrics.port if self._metrics else 0
        if self._settings.ready_file:
            body = json.dumps({"address": address, "metrics": metrics, "pid": os.getpid()})
            write_atomically(Path(self._settings.ready_file), body)
        tail = f" metrics {metrics}" if metrics else ""
        print(f"READY {self.name} {address}{tail}", flush=True)  # noqa: T201 - for people and launchers
        notify("READY=1")

    def start_metrics(self) -> None:
        if self._settings.metrics_port >= 0:
            _tell_expiries(self._settings)
            self._metrics = telemetry.MetricsServer(self._settings.metrics_port, host=self._settings.metrics_host)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._metrics:
            self._metrics.close()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error, task.get_name())


def run(main: Callable[[Shutdown], Awaitable[None]], name: str, settings: ProcessSettings | None = None) -> NoReturn:
    """Run a service until it ends, and exit. `main` waits for `shutdown.requested`, then stops what it started."""
    settings = settings or ProcessSettings()
    telemetry.configure(name, level=settings.log_level)
    if settings.die_with_parent:
        die_with_parent(settings.die_with_parent)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(_supervise(main, name, settings))
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # All is closed. Python's own teardown takes seconds with torch loaded, and changes nothing.
    os._exit(code)


async def _supervise(main: Callable[[Shutdown], Awaitable[None]], name: str, settings: ProcessSettings) -> int:
    shutdown = Shutdown(name, settings)
    _watch_signals(shutdown)
    try:
        shutdown.start_metrics()
        task = asyncio.ensure_future(main(shutdown))
        crash = asyncio.create_task(_overdue(shutdown))
        await asyncio.wait({task, crash}, return_when=asyncio.FIRST_COMPLETED)
        crash.cancel()
        if not task.done():
            log.error("not ended in time after a failure")
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    except Exception as error:  # noqa: BLE001 - nothing above handles it
        shutdown.fail(error)
    finally:
        await shutdown.close()
    log.info("ended", failed=shutdown.failure is not None)
    return 1 if shutdown.failure else 0


def _tell_expiries(settings: ProcessSettings) -> None:
    """Export expiry times. A scrape reads the present files; a file that is gone keeps its last time."""
    from ebbtide.auth.security import expiries

    def ask(kind: str) -> float:
        known.update(expiries(settings))
        return known[kind]

    known = expiries(settings)
    for kind in known:
        _expires.labels(kind).set_function(partial(ask, kind))


async def _overdue(shutdown: Shutdown) -> None:
    """Return some time after a failure; without a failure, never."""
    await shutdown.requested.wait()
    if shutdown.failure is None:
        await asyncio.Event().wait()
    await asyncio.sleep(_CRASH_GRACE_S)


def _watch_signals(shutdown: Shutdown) -> None:
    def on_signal(number: int) -> None:
        if shutdown.requested.is_set():
            os._exit(130)
        log.info("asked to end", signal=signal.Signals(number).name)
        notify("STOPPING=1")
        shutdown.requested.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)


def log_failure(error: BaseException, task: str) -> None:
    """Log one line for an `EbbtideError`, whose text suffices, and a traceback for any other."""
    if isinstance(error, EbbtideError):
        log.error("failed", task=task, error=type(error).__name__, reason=str(error))
    else:
        log.error("failed", task=task, exc_info=error)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process (SIGKILL) when its parent process dies; exit now if it is dead already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)


def hide_memory() -> None:
    """Keep other processes of this user from reading this one's memory and environment (/proc/PID), and write no core
    dumps. Programs that this process starts are not affected.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE)")


async def race(*works: Awaitable[Any]) -> int:
    """Run all until one ends, then cancel the others and wait for them.

    Returns the index of the one that ended, or raises its error (the innermost one of task groups). If several end at
    once, the first one given counts.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    winner = next(number for number, task in enumerate(tasks) if task in done)
    if (error := tasks[winner].exception()) is not None:
        raise _innermost(error)
    return winner


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class Aside:
    """Runs functions one after another in one thread of its own.

    The thread lasts until `close` or the process's end, so children that die with their starting thread live on. Unlike
    an executor's, it does not delay the process's end.
    """

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work  # what it held is freed now, and not when the next work comes

    async def do(self, work: Callable[[], T]) -> T:
        """The result of `work`, or its error. A cancelled caller does not stop it."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            settle: Callable[[], None]
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001 - raised where it is awaited
                settle = partial(done.set_exception, error)
            else:
                settle = partial(done.set_result, result)
            if done.cancelled():  # nobody is told, so nothing is kept until the loop runs again
                return
            with contextlib.suppress(RuntimeError):  # the loop may be gone
                loop.call_soon_threadsafe(lambda: None if done.done() else settle())

        self._work.put(partial(contextvars.copy_context().run, run))  # logs say whose work it is
        return await done

    async def close(self, timeout_s: float) -> None:
        """Waits at most `timeout_s` for what was begun. The thread ends after it. Nothing may be begun any more."""
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self.do(lambda: None)
        finally:
            self._work.put(None)


def notify(state: str) -> None:
    """Notify systemd, if it started this process with a notify socket (sd_notify(3)). Failures are ignored."""
    if not (address := os.environ.get("NOTIFY_SOCKET", "")):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as there:
        there.connect(f"\0{address[1:]}" if address.startswith("@") else address)
        there.send(state.encode())


def write_atomically(path: Path, text: str) -> None:
    """Replace the file at `path` by `text`. Readers see the old file or the whole new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


def fsync(path: Path) -> None:
    """Make a file's content, or a directory's entries, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def allow_files(wanted: int) -> None:
    """Let this process open so many files, as far as the system does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < wanted:
        log.warning("this process may open fewer files than its clients may need", allowed=most, needed=wanted)
