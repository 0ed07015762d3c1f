"""Bounds what a connection may send before its request is read, and behind it, which uvicorn takes without end; and how
many connections there are: beyond them the one that is idle for longest is closed.

Invariant: at most one timer runs: for a head while no answer is under way, or for the rest of a body whose request was
answered before it had arrived. Trailers are never headers of a request. All of it is lost with the connection.
"""

import asyncio
from typing import Any, ClassVar, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ebbtide.gateway.access import RequestLimits

_TOO_LARGE: Final = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedProtocol(HttpToolsProtocol):
    """Ends connections that send too much, or too slowly, outside of a body that is being read."""

    limits: ClassVar[RequestLimits]
    idle: "ClassVar[dict[BoundedProtocol, None]]"  # connections of the server without a request, the longest idle first
    _reads_head = True  # no: a body is arriving
    _head_bytes = 0
    _framing_bytes = 0  # behind the last part of a body: chunk extensions and trailers
    _discarded_bytes = 0  # of a body, behind the answer to its request
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._time(self.limits.header_s)
        self.idle[self] = None
        if len(self.connections) > self.limits.connections:
            oldest = next(iter(self.idle))  # at least this one is idle
            del self.idle[oldest]
            oldest.transport.abort()  # a peer that reads nothing would keep a closing one open

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_timer()
        self.idle.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._reads_head:
            self._head_bytes += len(data)
            # A client that sends ahead does not shorten the answer that it is reading.
            if self._timer is None and self._is_answered:
                self._time(self.limits.header_s)
        else:
            self._framing_bytes += len(data)
            self._discarded_bytes += len(data) if self._is_answered else 0
        super().data_received(data)
        if not self.transport.is_closing():
            self._check_bytes()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reads_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._end_timer()
        self.idle.pop(self, None)
        self._reads_head, self._framing_bytes, self._discarded_bytes = False, 0, 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._framing_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._reads_head, self._head_bytes = True, 0
        if self._is_answered:  # uvicorn's timer of a kept connection ended with the body's next part
            self._time(self.limits.header_s)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing() or not self._is_answered:
            return
        self.idle[self] = None
        if not self._reads_head:
            # To close at once could reset the connection before the client has read its answer.
            self._time(self.limits.body_s)
        elif self._head_bytes:
            self._time(self.limits.header_s)

    @property
    def _is_answered(self) -> bool:
        """Whether every request whose head has arrived has its whole answer."""
        return self.cycle is None or self.cycle.response_complete

    def _check_bytes(self) -> None:
        """If the head is complete by now, a part of the data was its body."""
        if self._reads_head and self._head_bytes > self.limits.header_bytes:
            if self._is_answered:  # else this would stand in the middle of an answer
                self.transport.write(_TOO_LARGE)
            self.transport.close()
        elif not self._reads_head and (
            self._framing_bytes > self.limits.header_bytes or self._discarded_bytes > self.limits.body_bytes
        ):
            self.transport.close()

    def _time(self, seconds: float) -> None:
        self._end_timer()
        self._timer = self.loop.call_later(seconds, self._late)

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.close()


def bounded_protocol(limits: RequestLimits) -> type[BoundedProtocol]:
    """The protocol with these limits: uvicorn takes a class."""
    return type("LimitedProtocol", (BoundedProtocol,), {"limits": limits, "idle": {}})
