"""Bounds what a connection may send before its request is read. uvicorn by itself takes headers without end."""

import asyncio
from typing import Any, ClassVar, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ebbtide.gateway.access.request_limits import RequestLimits

_TOO_LARGE: Final = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedProtocol(HttpToolsProtocol):
    """Ends connections whose request line and headers are too large, or take too long."""

    limits: ClassVar[RequestLimits]
    _head_bytes = 0
    _reads_head = True
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._reads_head:
            if self._head_timer is None:
                self._begin_head()
            self._head_bytes += len(data)
        super().data_received(data)
        # If the head is complete by now, a part of the data was its body.
        if self._reads_head and self._head_bytes > self.limits.header_bytes and not self.transport.is_closing():
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._reads_head, self._head_bytes = True, 0

    def _begin_head(self) -> None:
        self._reads_head, self._head_bytes = True, 0
        self._head_timer = self.loop.call_later(self.limits.header_s, self._late)

    def _end_head(self) -> None:
        self._reads_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _late(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()


def bounded_protocol(limits: RequestLimits) -> type[BoundedProtocol]:
    """The protocol with these limits: uvicorn takes a class."""
    return type("LimitedProtocol", (BoundedProtocol,), {"limits": limits})
