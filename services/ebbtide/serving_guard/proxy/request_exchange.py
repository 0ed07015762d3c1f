"""Passes one request from a client's connection to the engine's, and its answer back.

Invariant: an exchange is over when its answer is complete, refused or broken, or its client has left; by then the
listener has had its `ended`. Bytes wait here only while no connection takes them, and then their sender is not read.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, Protocol

from ebbtide import telemetry
from ebbtide.serving_guard import metrics
from ebbtide.serving_guard.proxy import http_heads
from ebbtide.serving_guard.proxy.engine_connections import EngineConnection, EnginePool
from ebbtide.serving_guard.proxy.http_heads import Header, RequestHead
from ebbtide.serving_guard.proxy.request_timing import PromptEstimate, RequestListener, TimedRequest, estimate_prompt
from ebbtide.serving_guard.settings import ProxySettings

log = telemetry.get_logger(__name__)

#: Paths of POSTs that use the engine; other paths (tokenize, models, metrics) pass without being timed.
_INFERENCE: Final = frozenset((
    b"/v1/completions", b"/v1/chat/completions", b"/v1/chat/completions/batch", b"/v1/responses", b"/v1/messages",
    b"/v1/embeddings", b"/v1/rerank", b"/v2/rerank", b"/v1/score", b"/v2/embed", b"/v1/audio/transcriptions",
    b"/v1/audio/translations", b"/inference/v1/generate", b"/cohere/v2/chat", b"/invocations", b"/pooling",
    b"/classify", b"/rerank", b"/score", b"/generative_scoring", b"/generate",
))  # fmt: skip
#: Methods of requests that may be sent a second time, because doing them twice changes nothing (RFC 9110, 9.2.2). An
#: engine that sent nothing may still have read a POST.
_IDEMPOTENT: Final = frozenset((b"GET", b"HEAD", b"OPTIONS", b"PUT", b"DELETE"))


class RequestOrigin(Protocol):
    """What an exchange needs of the client's connection."""

    def write(self, data: bytes) -> None: ...

    def done(self, *, close: bool) -> None:
        """The exchange is over; `close`: the connection cannot carry another."""

    def drop(self) -> None:
        """Close the connection at once, so that the client sees that its answer is incomplete."""

    def hold(self, held: bool) -> None:
        """Stop reading from the client, or read again."""

    @property
    def is_clogged(self) -> bool:
        """Whether the client leaves too much of its answer unread."""


class RequestExchange:
    """One exchange, made when the request's head is complete. The client's connection calls `begin`, `body`,
    `complete`, `cancel` and `clogged`; the engine's calls the methods of `AnswerReceiver`."""

    def __init__(
        self,
        client: RequestOrigin,
        pool: EnginePool,
        listener: RequestListener,
        settings: ProxySettings,
        head: RequestHead,
    ) -> None:
        self._client, self._pool, self._listener, self._settings = client, pool, listener, settings
        self.head = head
        self.head_only = head.method == b"HEAD"
        self._timed: TimedRequest | None = None
        self._kept = bytearray()  # of the body: what one read brought, or all until there is a connection
        self._whole_request = not head.has_body
        self._again = b""  # the whole request, while it may be sent again
        self._connection: EngineConnection | None = None
        self._task: asyncio.Task[None] | None = None
        self._held: asyncio.Future[None] | None = None
        self._out = b""  # the answer's head, until its body begins
        self._turn = False  # whether earlier requests on the client's connection are answered
        self._going = False  # whether it is being forwarded
        self._chunked = self._close = False  # how the answer goes to the client
        self.answering = False  # whether the engine's answer has begun
        self.over = False
        self.inference = head.method == b"POST" and http_heads.path_of(head.target).rstrip(b"/") in _INFERENCE

    @property
    def waits_for_client(self) -> bool:
        """Whether the rest of the request has to come before it is forwarded."""
        return not self._going

    @property
    def held_bytes(self) -> int:
        sent = self._connection.unsent_bytes if self._connection is not None else 0
        return len(self.head.lines) + len(self._kept) + len(self._again) + sent

    # -- the client's side ---------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Earlier requests on the client's connection are answered: this one may be forwarded."""
        self._turn = True
        self._consider()

    def body(self, data: bytes) -> None:
        if not self.over:
            self._kept += data  # tiny chunks are put together, because each object of its own takes 50 bytes

    def flush(self) -> None:
        """What the client's connection has read is here: send it on, if this request is being forwarded."""
        if self.over:
            return
        if self._connection is None:
            self._consider()
        elif self._kept:
            self._connection.send(self._framed(self._taken()))

    def complete(self) -> None:
        if self._whole_request or self.over:
            return
        self.flush()
        self._whole_request = True
        if self._connection is None:
            self._consider()
        elif self.head.length is None:
            self._connection.send(b"0\r\n\r\n")

    def cancel(self) -> None:
        """The client has left: end the request at the engine too."""
        if not self.over:
            self._finish(whole=False)

    def clogged(self, is_clogged: bool) -> None:
        """Stop reading from the engine while the client reads too slowly."""
        if self._connection is not None:
            self._connection.read_on(not is_clogged)

    # -- on its way ----------------------------------------------------------------------------------------------

    def _consider(self) -> None:
        """Forward the request as soon as possible: an inference request once its body is complete or too long to
        keep."""
        if not self._turn or self.over:
            return
        keep_bytes = self._settings.keep_body_bytes
        ample = len(self._kept) > (keep_bytes if self.inference else self._settings.buffer_bytes)
        if not self._going:
            short = not ample and (self.head.length or 0) <= keep_bytes
            if not (self.inference and short and not self._whole_request):
                self._forward()
        elif ample and not self._whole_request:
            self._client.hold(True)

    def _forward(self) -> None:
        self._going = True
        if self.inference:
            self._timed = TimedRequest(self._listener, self._asked())
            held = self._timed.ready() if self._settings.max_hold_s else None
            self._held = None if held is None else asyncio.ensure_future(held)
        connection = self._pool.idle() if self._held is None else None
        if connection is not None:
            self._send(connection)
        else:
            self._start(self._open())

    def _asked(self) -> PromptEstimate:
        if self._whole_request:
            return estimate_prompt(bytes(self._kept))
        return PromptEstimate(text_bytes=max(self.head.length or 0, len(self._kept)))

    def _start(self, opening: Coroutine[Any, Any, None]) -> None:
        self._task = asyncio.get_running_loop().create_task(opening)
        self._task.add_done_callback(self._opened)

    def _opened(self, task: asyncio.Task[None]) -> None:
        """After a failure to forward the request, answer the client and end the request."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("a request could not be forwarded", exc_info=error)
        if self.over:
            return
        if self.answering and not self._out:
            self._finish(whole=False)
            self._client.drop()
        else:
            self._refuse("the serving-guard failed to forward it; its log says why", "upstream_failed")

    async def _open(self, *, fresh: bool = False) -> None:
        if self._held is not None:
            await self._hold(self._held)
        try:
            connection = (None if fresh else self._pool.idle()) or await self._pool.connect()
        except (OSError, TimeoutError) as error:
            reason = str(error) or f"no connection within {self._settings.connect_timeout_s:g} s"
            self._refuse(f"the serving engine at {self._pool.url} cannot be reached: {reason}", "upstream_unreachable")
            return
        self._send(connection)

    async def _hold(self, held: asyncio.Future[None]) -> None:
        await asyncio.wait((held,), timeout=self._settings.max_hold_s)
        if not held.done():
            held.cancel()
        elif not held.cancelled() and (error := held.exception()) is not None:
            self._listener.failed("ready", error)

    def _send(self, connection: EngineConnection) -> None:
        self._connection = connection
        data, self._again = self._again, b""
        if not data:
            body = self._taken()
            data = self.head.forwarded(self._framing(len(body))) + (body if self._whole_request else self._framed(body))
            if connection.kept and self._whole_request and self.head.method in _IDEMPOTENT:
                self._again = data
        self._client.hold(False)  # first, for the connection may ask for it while it takes the data
        connection.ask(self, data)
        connection.read_on(not self._client.is_clogged)

    def _taken(self) -> bytes:
        data, self._kept = bytes(self._kept), bytearray()
        return data

    def _framing(self, body_bytes: int) -> bytes:
        """The header with the body's length."""
        if not self.head.has_body:
            return b""
        length = body_bytes if self._whole_request else self.head.length
        return b"Transfer-Encoding: chunked" if length is None else b"Content-Length: %d" % length

    def _framed(self, data: bytes) -> bytes:
        return data if self.head.length is not None or not data else http_heads.chunk(data)

    # -- the engine's side ---------------------------------------------------------------------------------------

    def answered(self, status: int, reason: bytes, headers: list[Header]) -> None:
        self.answering, self._again = True, b""
        empty = self.head_only or status in {204, 304}
        sized = empty or any(name.lower() == b"content-length" for name, _ in headers)
        self._chunked = not sized and self.head.modern
        self._close = not (self.head.keep_alive and self._whole_request and (sized or self._chunked))
        extra = [b"Transfer-Encoding: chunked"] if self._chunked else []
        if self._close:
            extra.append(b"Connection: close")
        self._out = http_heads.answer_head(status, reason, headers, extra)
        if self._timed is not None:
            self._timed.headed(
                status, http_heads.value_of(headers, b"content-type"), http_heads.value_of(headers, b"content-encoding")
            )

    def passed(self, data: bytes, *, last: bool) -> None:
        out, self._out = self._out, b""
        if self._chunked:
            out += http_heads.chunk(data) if data else b""
            out += b"0\r\n\r\n" if last else b""
        else:
            out += data
        if out:
            self._client.write(out)
        if data and self._timed is not None:
            self._timed.body(data)
        if last:
            self._finish(whole=True)
            self._client.done(close=self._close)

    def broken(self, reason: str, *, stale: bool) -> None:
        self._connection = None
        if stale and self._again:
            self._start(self._open(fresh=True))
        elif self.answering and not self._out:
            self._finish(whole=False)
            self._client.drop()
        else:
            self._refuse(f"the serving engine at {self._pool.url} did not answer: {reason}", "upstream_failed")

    def pause(self) -> None:
        self._client.hold(True)

    def resume(self) -> None:
        self._client.hold(False)

    def _refuse(self, message: str, kind: str) -> None:
        close = not (self.head.keep_alive and self._whole_request)
        self._finish(whole=False)
        metrics.ENGINE_FAILURES.inc()
        self._client.write(http_heads.failure(502, message, kind, close=close, body=not self.head_only))
        self._client.done(close=close)

    def _finish(self, *, whole: bool) -> None:
        """Release everything. If the answer is incomplete, this closes the engine's connection, which ends its work."""
        self.over = True
        self._kept, self._again = bytearray(), b""
        if self._held is not None and not self._held.done():
            self._held.cancel()
        if self._task is not None and not self._task.done() and self._task is not asyncio.current_task():
            self._task.cancel()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.release(reusable=whole and self._whole_request)
        if self._timed is not None:
            self._timed.end(whole=whole)
