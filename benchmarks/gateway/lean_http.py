"""The least of HTTP/1.1 that a client of a gateway needs: thousands of connections must cost less than what they
measure.
"""

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

_HEAD_END: Final = b"\r\n\r\n"
#: An event that carries something, as all of OpenAI's do.
_EVENT: Final = b"data: "


def request(method: str, path: str, key: str, body: Mapping[str, Any] | None = None) -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    kind = f"content-type: application/json\r\ncontent-length: {len(content)}\r\n" if content else ""
    return f"{method} {path} HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer {key}\r\n{kind}\r\n".encode() + content


class Answer(Struct, frozen=True):
    """`seconds`: from the request's first byte to the answer's last."""

    status: int
    body: bytes
    seconds: float


class Connection:
    """Sends one request after another, and reads answers that state their length."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, address: str) -> "Connection":
        host, _, port = address.rpartition(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    async def ask(self, sent: bytes) -> Answer:
        began = time.perf_counter()
        self._writer.write(sent)
        head = (await self._reader.readuntil(_HEAD_END)).decode("latin-1").lower()
        length = int(head.partition("content-length:")[2].partition("\r\n")[0])
        body = await self._reader.readexactly(length)
        return Answer(int(head.split(" ", 2)[1]), body, time.perf_counter() - began)

    def close(self) -> None:
        self._writer.close()


class EventStream(asyncio.Protocol):
    """One streamed answer: counts its events, and notes the time between two reads that have some. `first` is done with
    the first event behind the answer's opening, or with the text of a refusal.
    """

    def __init__(self, sent: bytes, gaps: list[float]) -> None:
        """`gaps`: where the waits for parts of the answer go, in seconds."""
        self._sent, self._gaps = sent, gaps
        self._kept, self._last, self._status = b"", 0.0, 0
        self.events = 0
        self.first: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.over = asyncio.Event()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(self._sent)

    def data_received(self, data: bytes) -> None:
        data = self._kept + data
        if not self._status:
            head, end, data = data.partition(_HEAD_END)
            if not end:
                self._kept = head
                return
            self._status = int(head.split(b" ", 2)[1])
        if self._status != 200:
            self._told(f"{self._status}: {data.decode(errors='replace')}" if data else "")
            return
        count = data.count(_EVENT)
        self._kept = b"" if data.endswith(b"\n") else data[1 - len(_EVENT) :]
        if count:
            self._counted(count)
        if data.endswith(b"0\r\n\r\n"):
            self.over.set()

    def _counted(self, count: int) -> None:
        now = time.perf_counter()
        if self.events:
            self._gaps.append(now - self._last)
        self.events, self._last = self.events + count, now
        if self.events > 1:  # the first one says who speaks
            self._told("open")

    def connection_lost(self, exc: Exception | None) -> None:
        self._told(f"lost: {exc}")
        self.over.set()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _told(self, what: str) -> None:
        if what and not self.first.done():
            self.first.set_result(what)
