"""Runs the OpenAI-compatible streaming reverse proxy in front of one serving engine.

Method, target, headers, status and bodies pass unchanged, except for hop-by-hop headers. If a client leaves, its
request ends at the engine at once. If the engine fails, the client gets a 502 with the reason. Inference requests are
timed for a `TrafficListener`, whose failures do not affect them. The proxy waits only for the client, the engine, and
(for `max_hold_s` at most) the rollout step under way.

Both sides use `asyncio.Protocol` and httptools (llhttp, the parser of Node.js), without a task for each request. A
streamed answer of 8 events takes about 0.15 ms of a core (`benchmarks/proxy.py`).
"""

import asyncio
import contextlib
import os
import socket
from typing import Final

from ebbtide.errors import InvalidRequest
from ebbtide.runtime import allow_files
from ebbtide.serving_guard.proxy.clients import ClientConnection, ClientTable
from ebbtide.serving_guard.proxy.engine_connections import EnginePool
from ebbtide.serving_guard.proxy.request_timing import RequestListener, TrafficListener
from ebbtide.serving_guard.settings import ProxySettings

#: Checks of time limits within the shortest of them; there is at least one a second.
_CHECKS: Final = 4
#: Open files besides two for each client: logs, grants, pages and the like.
_SPARE_FILES: Final = 256


class Proxy:
    """`upstream` is the engine's http://HOST:PORT, `listen` HOST:PORT (port 0: any), unless systemd hands a socket
    over. Raises `InvalidRequest` for an upstream that is not of this form, and when started for such a `listen`."""

    def __init__(
        self, settings: ProxySettings, upstream: str, traffic: TrafficListener, listen: str = "127.0.0.1:8100"
    ) -> None:
        self._settings, self._listen = settings, listen
        self.listener = RequestListener(traffic)
        self.pool = EnginePool(upstream, settings)
        self.clients = ClientTable(settings, self.pool, self.listener)
        self.address = ""
        self._servers: list[asyncio.Server] = []
        self._checking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Accept connections, after raising this process's limit of open files to what clients may need."""
        allow_files(2 * self._settings.max_connections + _SPARE_FILES)
        loop = asyncio.get_running_loop()
        taken = listening_sockets(self._listen)
        self.address = socket_address(taken[0])
        self._servers = [
            await loop.create_server(lambda: ClientConnection(self.clients), sock=one, backlog=_BACKLOG)
            for one in taken
        ]
        self._checking = loop.create_task(self._check())

    async def stop(self) -> None:
        """Accept no further requests, and end those under way after `drain_s`."""
        for server in self._servers:
            server.close()
        self.clients.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_s):
                await self.clients.empty.wait()
        self.clients.abort()
        if self._checking is not None:
            self._checking.cancel()
            await asyncio.gather(self._checking, return_exceptions=True)
        self.pool.close()
        await self.clients.empty.wait()
        await self.pool.empty.wait()

    async def _check(self) -> None:
        settings = self._settings
        shortest = min(
            settings.header_timeout_s, settings.body_timeout_s, settings.idle_timeout_s, settings.stall_timeout_s
        )
        while True:
            await asyncio.sleep(min(1.0, shortest / _CHECKS))
            self.clients.check()


_FIRST: Final = 3
#: Connections that wait to be accepted; the kernel applies its own bound if that is lower.
_BACKLOG: Final = 1024


def listening_sockets(listen: str) -> list[socket.socket]:
    """The sockets handed over by systemd, if any, else one bound to `listen` (HOST:PORT; port 0: any).

    Raises `InvalidRequest` naming `listen` or LISTEN_FDS.
    """
    return handed_over() or [bound_socket(listen)]


def handed_over() -> list[socket.socket]:
    """The sockets that systemd passed to this process (sd_listen_fds(3): from file descriptor 3 on, counted by
    LISTEN_FDS for the process LISTEN_PID). Child processes inherit neither these nor the variables.

    A socket that systemd holds outlives the guard. While no guard runs, clients wait in its queue instead of being
    refused, and the next guard takes the same socket.
    """
    count, pid = os.environ.get("LISTEN_FDS", ""), os.environ.get("LISTEN_PID", "")
    if not count.isdecimal() or pid != str(os.getpid()):
        return []
    for name in ("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"):
        os.environ.pop(name, None)
    return [_adopted(number) for number in range(_FIRST, _FIRST + int(count))]


def _adopted(number: int) -> socket.socket:
    try:
        os.set_inheritable(number, False)
        taken = socket.socket(fileno=number)
        listens = taken.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        message = f"file descriptor {number} is not a socket ({error.strerror})"
        raise InvalidRequest(message, field="LISTEN_FDS") from None
    if taken.type != socket.SOCK_STREAM or not listens or taken.family not in {socket.AF_INET, socket.AF_INET6}:
        raise InvalidRequest(f"file descriptor {number} is not a listening TCP socket", field="LISTEN_FDS")
    taken.setblocking(False)
    return taken


def bound_socket(listen: str) -> socket.socket:
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidRequest(f"{listen!r} is not of the form HOST:PORT", field="listen")
    host = host.strip("[]")
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, int(port)))
        made.listen(_BACKLOG)
    except OSError as error:
        made.close()
        raise InvalidRequest(f"cannot bind {listen} ({error.strerror or error})", field="listen") from None
    made.setblocking(False)
    return made


def socket_address(taken: socket.socket) -> str:
    """HOST:PORT for clients."""
    host, port = taken.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
