"""Opens, pools and reads connections to the serving engine.

Invariant: a connection carries one request at a time, and goes back to the pool only after a complete request and a
complete answer. Anything else closes it, which tells the engine to stop work for that request.
"""

import asyncio
import select
import time
from collections import deque
from typing import Final, Protocol, cast
from urllib.parse import urlsplit

import httptools

from ebbtide.errors import InvalidRequest
from ebbtide.serving_guard import metrics
from ebbtide.serving_guard.proxy.http_heads import Header
from ebbtide.serving_guard.settings import ProxySettings

#: Bytes of an answer's whole head.
_LONGEST_HEAD: Final = 256 << 10
_SWITCHED: Final = 101
#: A health check uses the result of an earlier one for this long.
_FRESH_S: Final = 0.5
_PROBE_S: Final = 1.0


class AnswerReceiver(Protocol):
    """Receives the engine's answer: one exchange."""

    head_only: bool

    def answered(self, status: int, reason: bytes, headers: list[Header]) -> None:
        """Take the answer's head."""

    def passed(self, data: bytes, *, last: bool) -> None:
        """Take new bytes of the body; `last`: the answer is complete."""

    def broken(self, reason: str, *, stale: bool) -> None:
        """The answer will not complete. `stale`: nothing of it came, and the connection was kept from an earlier
        request, so the engine may have closed it. Whether it has read this request is uncertain."""

    def pause(self) -> None:
        """Send no more of the request's body for now."""

    def resume(self) -> None: ...


class EngineConnection(asyncio.Protocol):
    """One connection to the engine. It parses answers and hands them to the asker."""

    def __init__(self, pool: "EnginePool") -> None:
        self._pool = pool
        self.transport: asyncio.Transport
        self.idle_since = 0.0  # when its last answer was complete
        self._asker: AnswerReceiver | None = None
        self.kept = False  # whether it carried a request before
        self._lost = False
        self._poll = select.poll()
        self._parser = httptools.HttpResponseParser(self)
        self._reset()

    def _reset(self) -> None:
        self._reason = b""
        self._headers: list[Header] = []
        self._head_bytes = 0
        self._pieces: list[bytes] = []
        self._received = self._headed = self._interim = self._complete = self._until_close = False
        self._problem = ""  # why the answer, or the connection, cannot be used
        self._keeps = False  # whether the connection outlives this answer

    def ask(self, asker: AnswerReceiver, head: bytes) -> None:
        """Send a request's head and the part of the body that is there; the rest follows by `send`."""
        self._reset()
        self._asker = asker
        if self._lost:  # it closed while it had no asker
            asyncio.get_running_loop().call_soon(self._end_broken, "it closed the connection")
            return
        self.transport.write(head)

    def send(self, data: bytes) -> None:
        self.transport.write(data)

    @property
    def unsent_bytes(self) -> int:
        return self.transport.get_write_buffer_size()

    @property
    def is_silent(self) -> bool:
        """Whether the engine has neither closed it nor sent anything that the event loop has not read yet."""
        return not self.transport.is_closing() and not self._poll.poll(0)

    def read_on(self, wanted: bool) -> None:
        """Read more of the answer, or stop reading while its client leaves too much unread."""
        if not self.transport.is_closing():
            if wanted:
                self.transport.resume_reading()
            else:
                self.transport.pause_reading()

    def release(self, *, reusable: bool) -> None:
        """Go back to the pool, or close: the asker needs it no longer."""
        self._asker = None
        if reusable and not self.transport.is_closing() and self._keeps:
            self.kept, self.idle_since = True, time.monotonic()
            self.read_on(True)
            self._pool.put(self)
        else:
            self.transport.abort()

    # -- asyncio -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=self._pool.settings.buffer_bytes)
        self._poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN | select.POLLRDHUP)

    def data_received(self, data: bytes) -> None:
        asker = self._asker
        if asker is None:  # it sends data without a request
            self.transport.abort()
            return
        self._received = True
        if not self._headed:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._problem = self._problem or f"its answer is not HTTP/1.1 ({type(error).__name__})"
        if not self._headed and self._head_bytes > _LONGEST_HEAD:
            self._problem = "the head of its answer is too long"
        if self._problem and not (self._headed and self._complete):
            self._end_broken(self._problem)
            return
        if self._headed:
            if self._problem:  # it sent more than one answer
                self.transport.abort()
            pieces, self._pieces = self._pieces, []
            asker.passed(pieces[0] if len(pieces) == 1 else b"".join(pieces), last=self._complete)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._pool.lost(self)
        del self._parser  # it refers back to this object
        if (asker := self._asker) is None:
            return
        if self._until_close and exc is None:
            self._complete = True
            asker.passed(b"", last=True)
            return
        self._end_broken("it closed the connection" + (f" ({exc})" if exc else ""))

    def _end_broken(self, reason: str) -> None:
        asker, self._asker = self._asker, None
        self.transport.abort()
        if asker is not None:
            asker.broken(reason, stale=self.kept and not self._received)

    def pause_writing(self) -> None:
        if self._asker is not None:
            self._asker.pause()

    def resume_writing(self) -> None:
        if self._asker is not None:
            self._asker.resume()

    # -- the parser ----------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._complete:
            self._problem = "it answered twice"

    def on_status(self, reason: bytes) -> None:
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._headed:  # trailers are dropped
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._complete or self._asker is None:
            return
        if status < 200:  # an interim answer, such as 103; the final one follows
            self._interim = True
            if status == _SWITCHED:
                self._problem = "it switched protocols without a request to do so"
            return
        codings = [value.lower() for name, value in self._headers if name.lower() == b"transfer-encoding"]
        if codings not in ([], [b"chunked"]):
            self._problem = "its answer has a Transfer-Encoding other than chunked"
            return
        self._headed = True
        # After an answer to HEAD the parser waits for a body of the announced length, so it reads no other answer.
        self._keeps = self._parser.should_keep_alive() and not self._asker.head_only
        bounded = codings or any(name.lower() == b"content-length" for name, _ in self._headers)
        empty = status in {204, 304} or self._asker.head_only
        self._until_close = not bounded and not empty
        self._asker.answered(status, self._reason, self._headers)
        if self._asker is not None and self._asker.head_only:
            self._complete = True

    def on_body(self, data: bytes) -> None:
        if not self._complete:
            self._pieces.append(data)

    def on_message_complete(self) -> None:
        if self._interim:
            self._interim, self._reason, self._headers = False, b"", []
        else:
            self._complete = True


class EnginePool:
    """Keeps idle connections to the engine for the next request; the one used last is taken first."""

    def __init__(self, url: str, settings: ProxySettings) -> None:
        self._host, self._port = address_of(url)
        self.url, self.settings = url, settings
        self._idle: deque[EngineConnection] = deque()
        self._open: set[EngineConnection] = set()
        self._reached: tuple[float, bool] = (0.0, False)  # when the engine was last probed, and whether it accepted
        self._probe: asyncio.Task[bool] | None = None
        self.empty = asyncio.Event()
        self.empty.set()

    def __len__(self) -> int:
        return len(self._open)

    def idle(self) -> EngineConnection | None:
        """Take an idle connection out of the pool; None: there is none."""
        oldest = time.monotonic() - self.settings.keep_upstream_s
        while self._idle:
            connection = self._idle.pop()
            if connection.idle_since >= oldest and connection.is_silent:
                return connection
            connection.transport.abort()
        return None

    async def connect(self) -> EngineConnection:
        """Open a new connection. Raises `OSError` or `TimeoutError`."""
        metrics.ENGINE_CONNECTS.inc()
        async with asyncio.timeout(self.settings.connect_timeout_s):
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(lambda: EngineConnection(self), self._host, self._port)
        # Counted only now: uvloop does not call `connection_lost` if the connection is cancelled while it is made.
        if not connection.transport.is_closing():
            self._open.add(connection)
            self.empty.clear()
        return connection

    async def reachable(self) -> bool:
        """Whether the engine accepts connections. Concurrent callers share one probe."""
        at, reached = self._reached
        if time.monotonic() - at < _FRESH_S:
            return reached
        if self._probe is None or self._probe.done():
            self._probe = asyncio.get_running_loop().create_task(self._try_connecting())
        return await asyncio.shield(self._probe)

    async def _try_connecting(self) -> bool:
        try:
            async with asyncio.timeout(_PROBE_S):
                _, writer = await asyncio.open_connection(self._host, self._port)
            writer.close()
            reached = True
        except (OSError, TimeoutError):
            reached = False
        self._reached = (time.monotonic(), reached)
        return reached

    def put(self, connection: EngineConnection) -> None:
        self._idle.append(connection)

    def lost(self, connection: EngineConnection) -> None:
        self._open.discard(connection)
        if not self._open:
            self.empty.set()

    def prune(self) -> None:
        """Close connections that were idle too long; those used longest ago come first."""
        oldest = time.monotonic() - self.settings.keep_upstream_s
        while self._idle and (self._idle[0].idle_since < oldest or self._idle[0].transport.is_closing()):
            self._idle.popleft().transport.abort()

    def close(self) -> None:
        for connection in list(self._open):
            connection.transport.abort()
        self._idle.clear()


def address_of(url: str) -> tuple[str, int]:
    """Host and port of `http://HOST:PORT`. Raises `InvalidRequest` for any other form."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InvalidRequest(f"{error}: give http://HOST:PORT", field="upstream") from None
    if parts.scheme != "http" or not parts.hostname or parts.path not in {"", "/"} or parts.query or parts.username:
        raise InvalidRequest(f"{url!r} is not of the form http://HOST:PORT", field="upstream")
    return parts.hostname, port or 80
