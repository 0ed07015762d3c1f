"""All clients' connections: who is let in, who makes room, who answers.

Invariant: there are never more than `max_connections`, plus those that are just being refused; and a request that is
complete is never given up to make room.
"""

import asyncio
import heapq
import time
from collections import Counter
from typing import Final

from ebbtide import telemetry
from ebbtide.serving_guard import metrics
from ebbtide.serving_guard.proxy import http_heads
from ebbtide.serving_guard.proxy.client_connection import ClientConnection, RequestAnswerer
from ebbtide.serving_guard.proxy.engine_connections import EnginePool
from ebbtide.serving_guard.proxy.http_heads import HeadRefused, RequestHead
from ebbtide.serving_guard.proxy.proxy_limits import ProxySettings
from ebbtide.serving_guard.proxy.request_exchange import RequestExchange
from ebbtide.serving_guard.proxy.request_timing import RequestListener

log = telemetry.get_logger(__name__)

HEALTH: Final = b"/ebbtide/health"
#: Making room looks at all connections, so it makes some at once.
_ROOM: Final = 32
#: What is known of the engine for so long is not asked again for a health check.
_FRESH_S: Final = 0.5
_PROBE_S: Final = 1.0


class ClientTable:
    def __init__(self, settings: ProxySettings, pool: EnginePool, listener: RequestListener) -> None:
        self.settings, self.pool, self.listener = settings, pool, listener
        self.draining = False
        self.empty = asyncio.Event()
        self.empty.set()
        self._open: set[ClientConnection] = set()
        self._of_address: Counter[str] = Counter()
        self._reached: tuple[float, bool] = (0.0, False)
        self._probe: asyncio.Task[bool] | None = None

    def __len__(self) -> int:
        return len(self._open)

    def admit(self, client: ClientConnection) -> HeadRefused | None:
        """Count a connection in; what is returned it is refused with."""
        self._open.add(client)
        self.empty.clear()
        self._of_address[client.address] += 1
        bound = self.settings.max_per_client
        if bound and self._of_address[client.address] > bound:
            return HeadRefused(
                429, f"there are more than {bound} connections from {client.address}", "rate_limit_error"
            )
        if len(self._open) > self.settings.max_connections and not self._make_room(client):
            return HeadRefused(
                503, f"all {self.settings.max_connections} connections are in use; try later", "overloaded"
            )
        return None

    def left(self, client: ClientConnection) -> None:
        if client not in self._open:  # it made room
            return
        self._open.discard(client)
        if not self._open:
            self.empty.set()
        self._of_address[client.address] -= 1
        if self._of_address[client.address] <= 0:
            del self._of_address[client.address]

    def answers(self, client: ClientConnection, head: RequestHead) -> RequestAnswerer:
        """Who answers this request."""
        if http_heads.path_of(head.target) == HEALTH and head.method in {b"GET", b"HEAD"}:
            return EngineHealth(client, self, head)
        return RequestExchange(client, self.pool, self.listener, self.settings, head)

    def check(self) -> None:
        now = time.monotonic()
        for client in list(self._open):
            try:
                client.check(now)
            except Exception:  # one client's trouble leaves the others their limits
                log.exception("a client's limits could not be looked at, its connection ends")
                client.transport.abort()
        self.pool.prune()

    def drain(self) -> None:
        """Take no further request on any connection."""
        self.draining = True
        for client in list(self._open):
            client.close_if_idle()

    def abort(self) -> None:
        for client in list(self._open):
            client.transport.abort()

    async def reachable(self) -> bool:
        """Whether the engine takes connections. Many that ask at once share one look."""
        at, reached = self._reached
        if time.monotonic() - at < _FRESH_S:
            return reached
        if self._probe is None or self._probe.done():
            self._probe = asyncio.get_running_loop().create_task(self._look())
        return await asyncio.shield(self._probe)

    async def _look(self) -> bool:
        try:
            async with asyncio.timeout(_PROBE_S):
                _, writer = await asyncio.open_connection(self.pool.host, self.pool.port)
            writer.close()
            reached = True
        except (OSError, TimeoutError):
            reached = False
        self._reached = (time.monotonic(), reached)
        return reached

    def _make_room(self, newcomer: ClientConnection) -> bool:
        spare = [(since, id(client), client) for client in self._open if (since := client.spare_since) is not None]
        oldest = [client for _, _, client in heapq.nsmallest(_ROOM, spare) if client is not newcomer]
        for client in oldest:
            self.left(client)
            client.transport.abort()
        metrics.CLIENTS_CUT.labels("room").inc(len(oldest))
        return bool(oldest)


class EngineHealth:
    """The proxy's own answer to a balancer's health check."""

    def __init__(self, client: ClientConnection, clients: ClientTable, head: RequestHead) -> None:
        self._client, self._clients, self._head = client, clients, head
        self._task: asyncio.Task[None] | None = None
        self.answering = self.waits_for_client = False

    def begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._answer())

    async def _answer(self) -> None:
        close, body = not self._head.keep_alive, self._head.method == b"GET"
        if self._clients.draining:
            self._client.write(
                http_heads.failure(503, "the serving-guard is ending", "draining", close=close, body=body)
            )
        elif await self._clients.reachable():
            self._client.write(http_heads.plain(200, b'{"status":"ok"}', close=close, body=body))
        else:
            message = f"the serving engine at {self._clients.pool.url} cannot be reached"
            self._client.write(http_heads.failure(503, message, "upstream_unreachable", close=close, body=body))
        self._client.done(close=close)

    def body(self, data: bytes) -> None: ...

    def complete(self) -> None: ...

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def clogged(self, is_clogged: bool) -> None: ...
