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
from typing import Final

from ebbtide.runtime import allow_files
from ebbtide.serving_guard.proxy import listening_sockets
from ebbtide.serving_guard.proxy.client_connection import ClientConnection
from ebbtide.serving_guard.proxy.client_table import ClientTable
from ebbtide.serving_guard.proxy.engine_connections import EnginePool
from ebbtide.serving_guard.proxy.proxy_limits import ProxySettings
from ebbtide.serving_guard.proxy.request_timing import RequestListener
from ebbtide.serving_guard.traffic.traffic_events import TrafficListener

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
        taken = listening_sockets.sockets(self._listen)
        self.address = listening_sockets.address(taken[0])
        self._servers = [
            await loop.create_server(
                lambda: ClientConnection(self.clients), sock=one, backlog=listening_sockets.BACKLOG
            )
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
