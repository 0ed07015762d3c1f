"""Admits clients' connections, closes idle ones to make room, and picks what answers a request.

Invariant: there are never more than `max_connections`, plus those that are being refused. A request that is complete
is never given up to make room for another client; only memory that clients hold ends it.
"""

import asyncio
import heapq
import time
from collections import Counter
from collections.abc import Callable
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
#: Connections closed at once to make room, because finding them looks at all connections.
_ROOM: Final = 32
#: Part of the bound on held bytes that is set free at once, because finding it looks at all connections.
_RELIEF: Final = 1 / 16


class ClientTable:
    def __init__(self, settings: ProxySettings, pool: EnginePool, listener: RequestListener) -> None:
        self.settings, self._pool, self._listener = settings, pool, listener
        self.draining = False
        self.empty = asyncio.Event()
        self.empty.set()
        self._open: set[ClientConnection] = set()
        self._of_address: Counter[str] = Counter()
        self._held_bytes = 0

    def __len__(self) -> int:
        return len(self._open)

    def admit(self, client: ClientConnection) -> HeadRefused | None:
        """Count a connection in. Returns why it is refused, if it is."""
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
        if client not in self._open:  # it was closed to make room
            return
        self._open.discard(client)
        self._held_bytes -= client.counted_bytes
        if not self._open:
            self.empty.set()
        self._of_address[client.address] -= 1
        if self._of_address[client.address] <= 0:
            del self._of_address[client.address]

    def count(self, client: ClientConnection) -> None:
        """Count what the client holds now; beyond the bound, those that hold most are given up."""
        if client not in self._open:
            return
        held, counted = client.held_bytes, client.counted_bytes
        client.counted_bytes = held
        self._held_bytes += held - counted
        if self._held_bytes > self.settings.max_held_bytes:
            self._relieve()

    def answers(self, client: ClientConnection, head: RequestHead) -> RequestAnswerer:
        """Make what answers this request."""
        if http_heads.path_of(head.target) == HEALTH and head.method in {b"GET", b"HEAD"}:
            return EngineHealth(client, self._pool, head, draining=lambda: self.draining)
        return RequestExchange(client, self._pool, self._listener, self.settings, head)

    def check(self) -> None:
        now = time.monotonic()
        for client in list(self._open):
            try:
                client.check(now)
            except Exception:  # the limits of other clients still hold
                log.exception("a client's limits could not be checked, its connection ends")
                client.transport.abort()
        self._pool.prune()

    def drain(self) -> None:
        """Accept no further request on any connection."""
        self.draining = True
        for client in list(self._open):
            client.close_if_idle()

    def abort(self) -> None:
        for client in list(self._open):
            client.transport.abort()

    def _relieve(self) -> None:
        """Count all clients, whose buffers drain uncounted. Give up the largest of the addresses that hold most."""
        of_address: Counter[str] = Counter()
        for client in self._open:
            client.counted_bytes = client.held_bytes
            of_address[client.address] += client.counted_bytes
        self._held_bytes = of_address.total()
        enough = round(self.settings.max_held_bytes * (1 - _RELIEF))
        for client in sorted(self._open, key=lambda one: (of_address[one.address], one.counted_bytes), reverse=True):
            if self._held_bytes <= enough:
                break
            metrics.CLIENTS_CUT.labels("memory").inc()
            client.give_up()
            self._held_bytes -= client.counted_bytes
            client.counted_bytes = 0

    def _make_room(self, newcomer: ClientConnection) -> bool:
        spare = [(since, id(client), client) for client in self._open if (since := client.spare_since) is not None]
        oldest = [client for _, _, client in heapq.nsmallest(_ROOM, spare) if client is not newcomer]
        for client in oldest:
            self.left(client)
            client.transport.abort()
        metrics.CLIENTS_CUT.labels("room").inc(len(oldest))
        return bool(oldest)


class EngineHealth:
    """Answers a balancer's health check."""

    def __init__(
        self, client: ClientConnection, pool: EnginePool, head: RequestHead, *, draining: Callable[[], bool]
    ) -> None:
        self._client, self._pool, self._head, self._draining = client, pool, head, draining
        self._task: asyncio.Task[None] | None = None
        self.answering = self.waits_for_client = False
        self.held_bytes = 0

    def begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._answer())

    async def _answer(self) -> None:
        close, body = not self._head.keep_alive, self._head.method == b"GET"
        if self._draining():
            self._client.write(
                http_heads.failure(503, "the serving-guard is ending", "draining", close=close, body=body)
            )
        elif await self._pool.reachable():
            self._client.write(http_heads.plain(200, b'{"status":"ok"}', close=close, body=body))
        else:
            message = f"the serving engine at {self._pool.url} cannot be reached"
            self._client.write(http_heads.failure(503, message, "upstream_unreachable", close=close, body=body))
        self._client.done(close=close)

    def body(self, data: bytes) -> None: ...

    def flush(self) -> None: ...

    def complete(self) -> None: ...

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def clogged(self, is_clogged: bool) -> None: ...
