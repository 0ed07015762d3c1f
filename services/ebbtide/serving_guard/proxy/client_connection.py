"""Parses requests from one client's connection, limits them, and sends answers in the order of the requests.

Invariant: requests of one connection are answered one after the other. While one waits behind another, no more is
read. Nothing is parsed after a refused request, because it is uncertain where that request ends.
"""

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol, cast

import httptools

from ebbtide import telemetry
from ebbtide.serving_guard import metrics
from ebbtide.serving_guard.proxy import http_heads
from ebbtide.serving_guard.proxy.http_heads import Header, HeadRefused

if TYPE_CHECKING:
    from ebbtide.serving_guard.proxy.client_table import ClientTable

log = telemetry.get_logger(__name__)

#: After a refusal, further bytes are discarded for this long, so that the client can read the reason.
_LINGER_S: Final = 2.0
#: Requests on one connection that wait for their turn. Only a client that does not read answers sends more.
_PIPELINED: Final = 64


class RequestAnswerer(Protocol):
    """Answers one request: an `Exchange`, or the proxy itself."""

    answering: bool

    @property
    def waits_for_client(self) -> bool: ...
    def begin(self) -> None: ...
    def body(self, data: bytes) -> None: ...
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
        self._body_bytes = 0
        self._expected = False  # whether the client waits for "100 Continue" before it sends that body
        self._target = b""
        self._headers: list[Header] = []
        self._head_bytes = 0
        self._head_since = 0.0
        self._refusal = b""
        self._discarding = False  # whether further bytes are discarded
        self._paused = False  # whether reading is paused
        self._held = False  # whether an answer asked for that
        self.is_clogged = False
        self._lingers_until = 0.0
        self._unread, self._unread_since = 0, 0.0
        self._heard_at = time.monotonic()

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
        self._heard_at = time.monotonic()
        in_head = self._incoming is None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._discarding = True  # what follows is not HTTP; the request itself is answered
        except httptools.HttpParserCallbackError:
            log.exception("a request could not be handled")
            self.refuse(HeadRefused(500, "the serving-guard failed; its log says why", "internal_error"))
        except httptools.HttpParserError as error:
            self.refuse(HeadRefused(400, f"this is not a valid HTTP/1.1 request: {error}"))
        if in_head and self._incoming is None and self._head_since:
            self._head_bytes += len(data)
            if self._head_bytes > 2 * self._settings.max_header_bytes:  # one line that does not end
                self._refuse_head()
        self._keep_order()

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
        self._target, self._headers, self._head_bytes = b"", [], 0
        self._head_since = time.monotonic()

    def on_url(self, target: bytes) -> None:
        self._target += target
        if len(self._target) > self._settings.max_header_bytes:
            self._refuse_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._discarding:
            return
        self._head_bytes += len(name) + len(value)
        self._headers.append((name, value))
        if self._head_bytes > self._settings.max_header_bytes or len(self._headers) > self._settings.max_headers:
            self._refuse_head()

    def on_headers_complete(self) -> None:
        if self._discarding:
            return
        self._head_since = 0.0
        if len(self._queue) >= _PIPELINED:
            self.refuse(HeadRefused(429, f"more than {_PIPELINED} requests wait on one connection", "rate_limit_error"))
            return
        parser, settings = self._parser, self._settings
        try:
            head = http_heads.read_head(
                parser.get_method(), self._target, self._headers, parser.get_http_version(),
                keep_alive=parser.should_keep_alive() and not parser.should_upgrade(),
            )  # fmt: skip
            if (head.length or 0) > settings.max_body_bytes:
                raise self._too_large()
        except HeadRefused as refused:
            self.refuse(refused)
            return
        self._body_bytes = 0
        answer = self._clients.answers(self, head)
        self._incoming = answer
        self._queue.append(answer)
        self._expected = head.expects
        if len(self._queue) == 1:
            self._begin()

    def on_body(self, data: bytes) -> None:
        if self._discarding or self._incoming is None:
            return
        self._body_bytes += len(data)
        if self._body_bytes > self._settings.max_body_bytes:
            self.refuse(self._too_large())
            return
        self._incoming.body(data)

    def on_message_complete(self) -> None:
        if not self._discarding and (answer := self._incoming) is not None:
            self._incoming = None
            answer.complete()

    # -- called by answers ---------------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        self.transport.write(data)

    def done(self, *, close: bool) -> None:
        answer = self._queue.popleft()
        self._held, self._heard_at = False, time.monotonic()
        if close or (self._clients.draining and not self._queue):
            self._end(linger=answer is self._incoming or bool(self._queue))
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
        return self._heard_at if not self._queue or self._queue[0].waits_for_client else None

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
        elif self._head_since and not self._paused and now - self._head_since > settings.header_timeout_s:
            self.refuse(
                HeadRefused(408, f"the headers were not complete within {settings.header_timeout_s:g} s", "timeout")
            )
        elif self._incoming and not self._paused and now - self._heard_at > settings.body_timeout_s:
            self.refuse(HeadRefused(408, f"no part of the body came for {settings.body_timeout_s:g} s", "timeout"))
        elif not self._queue and not self._head_since and now - self._heard_at > settings.idle_timeout_s:
            self.transport.close()

    def _begin(self) -> None:
        """Begin the first request in the queue; send "100 Continue" if the client waits for it."""
        answer = self._queue[0]
        if self._expected and answer is self._incoming:
            self._expected = False
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        answer.begin()

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
            self.transport.pause_reading()
        else:
            self._heard_at = time.monotonic()
            self._head_since = self._head_since and self._heard_at  # the pause was not the client's
            self.transport.resume_reading()
