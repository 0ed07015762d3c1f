"""Serves clients' connections: parses and limits their requests, and sends answers in the order of the requests.

Invariant: requests of one connection are answered one after the other. While one waits behind another, no more is
read. Nothing is parsed after a refused request, because it is uncertain where that request ends. There are never more
than `max_connections`, plus those that are being refused. A request that is complete is never given up to make room
for another client; only memory that clients hold ends it.
"""

import asyncio
import heapq
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Final, Protocol, cast

import httptools

from ebbtide import telemetry
from ebbtide.serving_guard import metrics
from ebbtide.serving_guard.proxy import http_heads
from ebbtide.serving_guard.proxy.engine_connections import EnginePool
from ebbtide.serving_guard.proxy.http_heads import Header, HeadRefused, RequestHead
from ebbtide.serving_guard.proxy.request_exchange import RequestExchange
from ebbtide.serving_guard.proxy.request_timing import RequestListener
from ebbtide.serving_guard.settings import ProxySettings

log = telemetry.get_logger(__name__)

#: After a refusal, further bytes are discarded for this long, so that the client can read the reason.
_LINGER_S: Final = 2.0
#: Bytes of chunk headers for each chunk of a body that are not counted as its framing; others' are shorter.
_CHUNK_HEAD: Final = 16
#: Bytes of a header's or a request's objects, roughly.
_HEADER_OBJECTS: Final = 176
_REQUEST_OBJECTS: Final = 2048
#: An answer's unread bytes up to this are not counted, because counting takes longer than sending them.
_UNCOUNTED: Final = 16 << 10
#: Requests on one connection that wait for their turn. Only a client that does not read answers sends more.
_PIPELINED: Final = 64


class RequestAnswerer(Protocol):
    """Answers one request: a `RequestExchange`, or the proxy itself."""

    answering: bool

    @property
    def waits_for_client(self) -> bool: ...
    @property
    def held_bytes(self) -> int: ...
    def begin(self) -> None: ...
    def body(self, data: bytes) -> None: ...
    def flush(self) -> None: ...
    def complete(self) -> None: ...
    def cancel(self) -> None: ...
    def clogged(self, is_clogged: bool) -> None: ...


class ClientConnection(asyncio.Protocol):
    """One client's connection. Times are those of `time.monotonic()`; 0: not begun."""

    def __init__(self, clients: "ClientTable") -> None:
        self._clients, self._settings = clients, clients.settings
        self.transport: asyncio.Transport
        self.address = ""
        self._parser = httptools.HttpRequestParser(self)
        self._queue: deque[RequestAnswerer] = deque()
        self._incoming: RequestAnswerer | None = None  # the request whose body is being read
        self._expected = False  # whether the client waits for "100 Continue" before it sends that body
        self._target = b""
        self._headers: list[Header] = []
        self._head_bytes = 0  # of the head, then of the trailers
        self._framing_bytes = 0  # of the chunks' extensions, and of trailers
        self._refusal = b""
        self._discarding = False  # whether further bytes are discarded
        self._paused = False  # whether reading is paused
        self._held = False  # whether an answer asked for that
        self.is_clogged = False
        self._lingers_until = 0.0
        self._unread, self._unread_since = 0, 0.0
        self._pace = RequestPace(self._settings, time.monotonic())
        self.counted_bytes = 0  # the clients' table's: what it counted last of `held_bytes`

    # -- asyncio -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's class does not derive from it
        self.transport.set_write_buffer_limits(high=self._settings.buffer_bytes)
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if peer else ""
        refused = self._clients.admit(self)
        if refused is not None:
            self.refuse(refused)

    def data_received(self, data: bytes) -> None:
        if self._discarding:
            return
        incoming, body_bytes = self._incoming, self._pace.body_bytes
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._discarding = True  # what follows is not HTTP; the request itself is answered
        except httptools.HttpParserCallbackError:
            log.exception("a request could not be handled")
            self.refuse(HeadRefused(500, "the serving-guard failed; its log says why", "internal_error"))
        except httptools.HttpParserError as error:
            self.refuse(HeadRefused(400, f"this is not a valid HTTP/1.1 request: {error}"))
        if self._incoming is not None:
            within = self._incoming is incoming  # whether all that was read is of this body
            self._count_framing(len(data) - (self._pace.body_bytes - body_bytes) if within else 0)
        elif incoming is None and self._pace.in_head:
            self._head_bytes += len(data)
            if self._head_bytes > 2 * self._settings.max_header_bytes:  # one line that does not end
                self._refuse_head()
        if self._incoming is not None:
            self._incoming.flush()
        self._keep_order()
        self._clients.count(self)

    def eof_received(self) -> bool:
        if self._queue:
            self.transport.abort()  # the client no longer reads the answer
        return False

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio passes it
        self._clients.left(self)
        self._discarding = True
        del self._parser  # it refers back to this object
        metrics.CANCELLED.inc(len(self._queue))
        for answer in self._queue:
            answer.cancel()
        self._queue.clear()

    def pause_writing(self) -> None:
        self.is_clogged = True
        if self._queue:
            self._queue[0].clogged(True)

    def resume_writing(self) -> None:
        self.is_clogged = False
        if self._queue:
            self._queue[0].clogged(False)

    # -- the parser ----------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._target, self._head_bytes = b"", 0
        self._pace.head_began(time.monotonic())

    def on_url(self, target: bytes) -> None:
        self._target += target
        if len(self._target) > self._settings.max_header_bytes:
            self._refuse_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._discarding:
            return
        self._head_bytes += len(name) + len(value)
        if self._incoming is None:
            self._headers.append((name, value))  # and a trailer, which no check has seen, is dropped
        if self._head_bytes > self._settings.max_header_bytes or len(self._headers) > self._settings.max_headers:
            self._refuse_head()

    def on_headers_complete(self) -> None:
        if self._discarding:
            return
        headers, self._headers = self._headers, []
        self._head_bytes = self._framing_bytes = 0
        self._pace.body_began(time.monotonic())
        if len(self._queue) >= _PIPELINED:
            self.refuse(HeadRefused(429, f"more than {_PIPELINED} requests wait on one connection", "rate_limit_error"))
            return
        parser, settings = self._parser, self._settings
        try:
            head = http_heads.read_head(
                parser.get_method(), self._target, headers, parser.get_http_version(),
                keep_alive=parser.should_keep_alive(), upgrades=parser.should_upgrade(),
            )  # fmt: skip
            if (head.length or 0) > settings.max_body_bytes:
                raise self._too_large()
        except HeadRefused as refused:
            self.refuse(refused)
            return
        answer = self._clients.answers(self, head)
        self._incoming = answer
        self._queue.append(answer)
        self._expected = head.expects
        if len(self._queue) == 1:
            self._begin()

    def on_body(self, data: bytes) -> None:
        if self._discarding or self._incoming is None:
            return
        self._pace.body_came(len(data), time.monotonic())
        self._framing_bytes -= _CHUNK_HEAD
        if self._pace.body_bytes > self._settings.max_body_bytes:
            self.refuse(self._too_large())
            return
        self._incoming.body(data)

    def on_message_complete(self) -> None:
        if not self._discarding and (answer := self._incoming) is not None:
            self._incoming = None
            self._pace.ended(time.monotonic())
            answer.complete()

    # -- called by answers ---------------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        self.transport.write(data)
        if self.transport.get_write_buffer_size() > _UNCOUNTED:
            self._clients.count(self)

    def done(self, *, close: bool) -> None:
        answer = self._queue.popleft()
        self._held, self._pace.heard_at = False, time.monotonic()
        if close or (self._clients.draining and not self._queue):
            self._end(linger=answer is self._incoming or bool(self._queue) or self._discarding)
            return
        if self._queue:
            self._begin()
        elif self._refusal:
            self._send_refusal()
        self._keep_order()

    def drop(self) -> None:
        self._queue.popleft()
        self.transport.abort()

    def hold(self, held: bool) -> None:
        self._held = held
        self._keep_order()

    # -- limits --------------------------------------------------------------------------------------------------

    def refuse(self, refused: HeadRefused) -> None:
        """Send the refusal after the answers to earlier requests, and accept nothing more from this client."""
        if self._discarding:
            return
        self._discarding = True
        metrics.REFUSED.labels(str(refused.status)).inc()
        self._refusal = http_heads.failure(refused.status, refused.message, refused.kind, close=True)
        if (answer := self._incoming) is not None:
            self._incoming = None
            if self._queue.pop() is not answer or answer.answering:
                self.transport.abort()
            answer.cancel()
        if not self._queue:
            self._send_refusal()

    @property
    def spare_since(self) -> float | None:
        """Since when the connection only waits for its client; None: a request is under way."""
        return self._pace.heard_at if not self._queue or self._queue[0].waits_for_client else None

    @property
    def held_bytes(self) -> int:
        """Bytes that this client's requests and unread answers hold, roughly."""
        held = self._head_bytes + self._framing_bytes + len(self._headers) * _HEADER_OBJECTS
        for answer in self._queue:
            held += answer.held_bytes + _REQUEST_OBJECTS
        return held + self.transport.get_write_buffer_size()

    def give_up(self) -> None:
        """Hold nothing any more: refuse a request that is not answered yet, with the reason, or end the connection."""
        if len(self._queue) == 1 and self._queue[0] is self._incoming and not self._incoming.answering:
            message = f"all clients hold {self._settings.max_held_bytes} bytes; try later"
            self.refuse(HeadRefused(503, message, "overloaded"))
        else:
            self.transport.abort()

    def close_if_idle(self) -> None:
        if not self._queue and not self._lingers_until:
            self.transport.close()

    def check(self, now: float) -> None:
        """Refuse or close what took too long. Called at regular intervals."""
        settings = self._settings
        unread = self.transport.get_write_buffer_size()
        if unread != self._unread:
            self._unread, self._unread_since = unread, now
        if self._lingers_until:
            if now > self._lingers_until:
                self.transport.abort()
        elif unread and now - self._unread_since > settings.stall_timeout_s:
            metrics.CLIENTS_CUT.labels("unread").inc()
            self.transport.abort()
        elif (refused := self._pace.overdue(now)) is not None:
            self.refuse(refused)
        elif not self._queue and not self._pace.in_head and now - self._pace.heard_at > settings.idle_timeout_s:
            self.transport.close()

    def _begin(self) -> None:
        """Begin the first request in the queue; send "100 Continue" if the client waits for it."""
        answer = self._queue[0]
        if self._expected and answer is self._incoming:
            self._expected = False
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        answer.begin()

    def _count_framing(self, count: int) -> None:
        """Count what a read brought of a body beside its content: chunk extensions and trailers."""
        self._framing_bytes = max(0, self._framing_bytes + count)
        if self._framing_bytes > self._settings.max_header_bytes:
            message = f"extensions and trailers are longer than {self._settings.max_header_bytes} bytes"
            self.refuse(HeadRefused(400, message))

    def _refuse_head(self) -> None:
        settings = self._settings
        bounds = f"{settings.max_header_bytes} bytes and {settings.max_headers} headers"
        self.refuse(HeadRefused(431, f"the request's head is longer than {bounds}"))

    def _too_large(self) -> HeadRefused:
        return HeadRefused(413, f"the body is longer than {self._settings.max_body_bytes} bytes")

    def _send_refusal(self) -> None:
        refusal, self._refusal = self._refusal, b""
        self.transport.write(refusal)
        self._end(linger=True)

    def _end(self, *, linger: bool) -> None:
        """Close. If the client may still be sending (`linger`), give it time to read the answer first."""
        self._discarding = True
        if not linger or self.transport.is_closing():
            self.transport.close()
            return
        for answer in self._queue:
            answer.cancel()
        self._queue.clear()
        self._incoming = None
        self._held = False
        self._keep_order()
        self._lingers_until = time.monotonic() + _LINGER_S
        self.transport.write_eof()

    def _keep_order(self) -> None:
        """Pause reading while an answer asks for it or a request waits for its turn."""
        paused = (self._held or len(self._queue) > 1) and not self._lingers_until
        if paused == self._paused or self.transport.is_closing():
            return
        self._paused = paused
        if paused:
            self._pace.paused(time.monotonic())
            self.transport.pause_reading()
        else:
            self._pace.resumed(time.monotonic())
            self.transport.resume_reading()


HEALTH: Final = b"/ebbtide/health"
#: Connections closed at once to make room, because finding them looks at all connections.
_ROOM: Final = 32
#: Part of the bound on held bytes that is set free at once, because finding it looks at all connections.
_RELIEF: Final = 1 / 16


class ClientTable:
    """Admits clients' connections, closes idle ones to make room, and picks what answers a request."""

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


class RequestPace:
    """Decides when a client takes too long over a request; `now` is when its connection began. It reads no clock:
    callers give seconds of the monotonic clock.

    Only a request's own bytes are progress. Empty lines between requests, chunk extensions and trailers are none, so
    they keep no connection open. Time in which the proxy itself reads nothing does not count.
    """

    def __init__(self, settings: ProxySettings, now: float) -> None:
        self._settings = settings
        self.heard_at = now  # when a request last made progress, or an answer was complete
        self.body_bytes = 0  # of the body that is being read, or was read last
        self._head_since: float | None = None
        self._body_since: float | None = None
        self._paused_since: float | None = None

    @property
    def in_head(self) -> bool:
        return self._head_since is not None

    def head_began(self, now: float) -> None:
        self._head_since = self.heard_at = now

    def body_began(self, now: float) -> None:
        self._head_since, self._body_since, self.heard_at, self.body_bytes = None, now, now, 0

    def body_came(self, count: int, now: float) -> None:
        self.body_bytes += count
        self.heard_at = now

    def ended(self, now: float) -> None:
        """The request is complete."""
        self._body_since, self.heard_at = None, now

    def paused(self, now: float) -> None:
        """Reading is paused."""
        self._paused_since = now

    def resumed(self, now: float) -> None:
        if self._paused_since is None:
            return
        pause_s, self._paused_since = now - self._paused_since, None
        self.heard_at = now
        if self._head_since is not None:
            self._head_since = now
        if self._body_since is not None:
            self._body_since += pause_s

    def overdue(self, now: float) -> HeadRefused | None:
        """The refusal of a request that is overdue."""
        limits = self._settings
        if self._paused_since is not None:
            return None
        if self._head_since is not None and now - self._head_since > limits.header_timeout_s:
            return _timeout(f"the headers were not complete within {limits.header_timeout_s:g} s")
        if self._body_since is None:
            return None
        if now - self.heard_at > limits.body_timeout_s:
            return _timeout(f"no part of the body came for {limits.body_timeout_s:g} s")
        rate = limits.min_body_rate
        if rate and now - self._body_since > limits.body_timeout_s + self.body_bytes / rate:
            return _timeout(f"the body came more slowly than {rate} bytes per second")
        return None


def _timeout(message: str) -> HeadRefused:
    return HeadRefused(408, message, "timeout")
