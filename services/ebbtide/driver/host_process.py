"""Starts, calls and ends one process of environment code.

Invariant: the process is usable until a call fails; then it is ended, and what it held is gone. Its keeper
(`ebbtide.driver.sandbox`) dies with the driver, and takes all that environment code started along.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Final, Self

import msgspec

from ebbtide import telemetry
from ebbtide.driver.environment_host import (
    LENGTH,
    MAX_FRAME,
    HostCall,
    HostPlan,
    HostReply,
    HostStarted,
    Request,
    frame,
)
from ebbtide.driver.settings import DriverSettings

log = telemetry.get_logger(__name__)
_KEEPER: Final = "ebbtide.driver.sandbox"
#: Python's start and the mounts take a tenth of a second; on a busy machine more.
_STARTING_S: Final = 60.0
_ENDING_S: Final = 5.0
#: Bytes of a process's output that are kept, for the message when it ends.
_TAIL: Final = 2000
#: The variables of the driver that an isolated process has, too: where Python finds its libraries.
_INHERITED: Final = ("LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")


class TookTooLong(Exception):
    """A call exceeded its time."""


class HostEnded(Exception):
    """The process has ended, or had to; the text says how."""


class IsolationRefused(Exception):
    """The host does not allow the isolation; the text says what it refused."""


def host_plan(settings: DriverSettings) -> HostPlan:
    """Returns how processes are made under these settings."""
    environments, security = settings.environments, settings.security
    secrets = (security.token_file, security.tls_key)
    return HostPlan(
        isolated=not environments.trust,
        user=environments.user if os.geteuid() == 0 else "",
        readable=tuple(
            dict.fromkeys([sys.prefix, sys.base_prefix, *_environment_paths(settings), *_own_paths(settings)])
        ),
        paths=tuple(_environment_paths(settings)),
        secrets=tuple(os.path.abspath(path) for path in secrets if path),  # noqa: PTH100 - links stay
        network=environments.network,
        memory_bytes=environments.memory_mib << 20,
    )


def _environment_paths(settings: DriverSettings) -> list[str]:
    """Returns the folders that only environments import from. The keeper must not: it runs before the isolation."""
    paths = [Path(path).resolve() for path in settings.environments.paths]
    return [str(path) for path in dict.fromkeys(paths) if path.exists()]


def _own_paths(settings: DriverSettings) -> list[str]:
    """Returns the folders that the driver's modules come from. The working directory is one only if it is named, or
    with trust: a service keeps its state there."""
    here, named = Path.cwd(), os.environ.get("PYTHONPATH", "").split(os.pathsep)
    keeps_here = settings.environments.trust or here in {Path(path).resolve() for path in named if path}
    paths = [Path(path or ".").resolve() for path in sys.path]
    return [str(path) for path in dict.fromkeys(paths) if path.exists() and (path != here or keeps_here)]


def _variables(settings: DriverSettings) -> dict[str, str]:
    """Returns the environment variables of a process. None is of Ebbtide: those may hold a token."""
    own = {"PYTHONPATH": os.pathsep.join(_own_paths(settings)), "PYTHONDONTWRITEBYTECODE": "1"}
    if settings.environments.trust:
        return {name: value for name, value in os.environ.items() if not name.startswith("EBBTIDE_")} | own
    kept = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # several processes share the cores
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", **kept, **threads, **own}  # noqa: S108 - its own


def _start_keeper(settings: DriverSettings, plan: HostPlan, connection: int) -> "subprocess.Popen[bytes]":
    """Starts the keeper by vfork, as `Popen` does: in a child of fork, gRPC's threads would start again and crash."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", _KEEPER, str(connection), msgspec.json.encode(plan).decode()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=_variables(settings),
        pass_fds=(connection,),
        start_new_session=True,
    )


class HostProcess:
    """A started process; `hosted` lists the episodes that it ever had."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._tail = b""
        self._listening = asyncio.create_task(self._listen())
        self.hosted: set[int] = set()
        self.closed: list[int] = []  # to tell with the next call

    @property
    def pid(self) -> int:
        """The keeper's process id on this host; those of environment code descend from it."""
        return self._process.pid

    @classmethod
    async def start(cls, settings: DriverSettings, plan: HostPlan) -> Self:
        """Raises `IsolationRefused`, `HostEnded` if the process does not come up, `OSError` if the host has none."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await asyncio.to_thread(_start_keeper, settings, plan, theirs.fileno())
            except OSError:
                ours.close()
                raise
        made = cls(process, *await asyncio.open_connection(sock=ours))
        try:
            started = msgspec.msgpack.decode(await made._exchange(b"", _STARTING_S), type=HostStarted)
        except BaseException:  # cancelled, too: nobody else knows of the process
            await asyncio.shield(made.end())
            raise
        if started.refused:
            await made.end()
            raise IsolationRefused(started.refused)
        if started.open_network:
            log.warning(
                "environment code has this host's network: root may make no namespaces here, so it is only another "
                "user; run the driver where namespaces are allowed, or close the network around it"
            )
        return made

    async def call(self, request: Request, *, timeout_s: float) -> HostReply:
        """Returns the process's answer. Raises `TookTooLong` after `timeout_s` seconds, and `HostEnded` if the process
        ends meanwhile or answers what is no answer. After an error, or when cancelled, the process is given up."""
        closed, self.closed = tuple(self.closed), []
        body = await self._exchange(frame(HostCall(request, closed)), timeout_s)
        try:
            return msgspec.msgpack.decode(body, type=HostReply)
        except msgspec.MsgspecError as error:
            self.abandon()
            raise HostEnded(f"the environment's process gave no answer that can be read ({error})") from None

    def abandon(self) -> None:
        """Has the keeper kill the process, without waiting for it."""
        self._writer.close()
        assert self._process.stdin is not None  # noqa: S101 - it is a pipe
        self._process.stdin.close()

    async def end(self) -> int:
        """Ends the process and waits until it is gone. Returns its exit status."""
        self.abandon()
        try:
            status = await asyncio.to_thread(self._process.wait, _ENDING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = await asyncio.to_thread(self._process.wait)
        self._listening.cancel()
        await asyncio.wait({self._listening})
        return status

    async def _exchange(self, message: bytes, timeout_s: float) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                self._writer.write(message)
                await self._writer.drain()
                (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                body = await self._reader.readexactly(length) if length <= MAX_FRAME else b""
        except TimeoutError:
            self.abandon()
            raise TookTooLong from None
        except (EOFError, ConnectionError):
            raise HostEnded(self._told(await self.end())) from None
        except asyncio.CancelledError:
            self.abandon()
            raise
        return body

    async def _listen(self) -> None:
        """Keeps the end of what the process prints."""
        reader = asyncio.StreamReader()
        protocol, loop = asyncio.StreamReaderProtocol(reader), asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: protocol, self._process.stdout)
        with contextlib.closing(transport):
            while chunk := await reader.read(1 << 16):
                self._tail = (self._tail + chunk)[-_TAIL:]

    def _told(self, status: int) -> str:
        how = f"status {status}"
        with contextlib.suppress(ValueError):
            how = signal.Signals(status - 128).name
        said = self._tail.decode(errors="replace").strip()
        return f"the environment's process ended with {how}" + (f"; it printed last: {said[-300:]}" if said else "")
