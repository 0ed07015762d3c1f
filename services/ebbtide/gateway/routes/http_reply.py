"""Sends the answer to one HTTP request, and notices when its client leaves."""

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec
from starlette.types import Receive, Send

from ebbtide.errors import AlreadyExists, BudgetSpent, EbbtideError, VersionUnavailable
from ebbtide.gateway.dialects.dialect import Answer, ErrorShape, retry_after_s, status_of

_encoder: Final = msgspec.json.Encoder()
_JSON: Final = (b"content-type", b"application/json")
#: No proxy on the way holds events back, or changes them.
_EVENTS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
)


class HttpReply:
    """The answer on one connection. `started`: its status is sent, so errors must follow in the body."""

    def __init__(self, receive: Receive, send: Send, request_id: str) -> None:
        self._receive, self._send = receive, send
        self.request_id = request_id
        self.started = False
        self._streams = False
        self._sent_at = time.monotonic()

    async def json(self, content: Any, status: int = 200, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        data = _encoder.encode(content)
        length = (b"content-length", str(len(data)).encode())
        await self._start(status, (_JSON, length, *headers))
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def error(self, error: EbbtideError, shape: ErrorShape) -> None:
        status = status_of(error)
        await self.json(shape(status, error, self.request_id), status, _error_headers(error, status))

    async def begin_events(self) -> None:
        await self._start(200, _EVENTS)
        self._streams, self._sent_at = True, time.monotonic()

    async def events(self, data: bytes) -> None:
        """Send whole events. Waits while the client reads slowly."""
        if data:
            self._sent_at = time.monotonic()
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end_events(self, data: bytes) -> None:
        self._streams = False
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def departure(self, answer_of: Callable[[], Answer | None], keep_alive_s: float) -> None:
        """Return when the client has left. Until then keep the stream alive while its answer has nothing new.

        The answer comes to be while this runs.
        """
        while True:
            quiet_s = time.monotonic() - self._sent_at if self._streams else 0.0
            try:
                async with asyncio.timeout(max(0.0, keep_alive_s - quiet_s)):
                    while (await self._receive())["type"] != "http.disconnect":
                        pass
                    return
            except TimeoutError:
                answer, quiet_s = answer_of(), time.monotonic() - self._sent_at
                if answer is not None and self._streams and quiet_s >= keep_alive_s:
                    await self.events(answer.idle())

    async def _start(self, status: int, headers: tuple[tuple[bytes, bytes], ...]) -> None:
        self.started = True
        named = (b"x-request-id", self.request_id.encode("latin-1", "replace"))
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, named]})


def _error_headers(error: EbbtideError, status: int) -> tuple[tuple[bytes, bytes], ...]:
    headers: list[tuple[bytes, bytes]] = []
    if (wait := retry_after_s(error)) is not None:
        headers.append((b"retry-after", str(max(1, math.ceil(wait))).encode()))
    if isinstance(error, AlreadyExists | VersionUnavailable):  # OpenAI's clients retry every other 409
        headers.append((b"x-should-retry", b"true" if isinstance(error, VersionUnavailable) else b"false"))
    if isinstance(error, BudgetSpent):
        headers.append((b"x-should-retry", b"false"))
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if status in (408, 413):
        headers.append((b"connection", b"close"))
    return tuple(headers)
