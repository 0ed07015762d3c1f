"""A lean engine and a lean client of short streamed chats, so that what is between them is what is measured."""

import asyncio
import json
import re
import time
from typing import Any, Final

EVENTS: Final = 8
_BODY: Final = json.dumps(
    {
        "model": "served",
        "stream": True,
        "max_tokens": EVENTS,
        "messages": [{"role": "user", "content": "Say in one sentence why the tide comes twice a day. " * 8}],
    }
).encode()
_REQUEST: Final = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: served.example\r\nAccept: */*\r\nUser-Agent: benchmark\r\n"
    b"Accept-Encoding: gzip, deflate\r\nAuthorization: Bearer none\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)
_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_LENGTH: Final = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_END: Final = b"0\r\n\r\n"


def _events() -> list[bytes]:
    made = []
    for number in range(EVENTS):
        delta: dict[str, Any] = {"content": f" word{number}"} if number else {"role": "assistant", "content": ""}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        event = {
            "id": "chatcmpl-9a3b", "object": "chat.completion.chunk", "created": 1, "model": "served",
            "choices": [choice],
        }  # fmt: skip
        text = b"data: " + json.dumps(event).encode() + b"\n\n"
        made.append(b"%x\r\n%b\r\n" % (len(text), text))
    made.append(b"e\r\ndata: [DONE]\n\n\r\n" + _END)
    return made


_EVENTS: Final = _events()


class Stub(asyncio.Protocol):
    """An engine that sends each token in a segment of its own: at once, or one each `step_s`."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self.transport: Any = None
        self._seen = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._seen += data
        end = self._seen.find(b"\r\n\r\n")
        found = _LENGTH.search(self._seen)
        if end < 0 or found is None or len(self._seen) < end + 4 + int(found[1]):
            return
        self._seen = b""
        self.transport.write(_HEAD)
        self._send(0)

    def _send(self, number: int) -> None:
        if self.transport.is_closing():
            return
        self.transport.write(_EVENTS[number])
        if number + 1 < len(_EVENTS):
            loop = asyncio.get_running_loop()
            if self._step_s:
                loop.call_later(self._step_s, self._send, number + 1)
            else:
                loop.call_soon(self._send, number + 1)


class Asker(asyncio.Protocol):
    """One connection that asks one request after another: seconds to the first token's event, and to the end."""

    def __init__(self) -> None:
        self.transport: Any = None
        self._tail = b""
        self._began = self._first = 0.0
        self._done: asyncio.Future[tuple[float, float]] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def ask(self) -> "asyncio.Future[tuple[float, float]]":
        self._done = asyncio.get_running_loop().create_future()
        self._first, self._began, self._tail = 0.0, time.perf_counter(), b""
        self.transport.write(_REQUEST)
        return self._done

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if not self._first and b"data: " in data:
            self._first = now - self._began
        self._tail = (self._tail + data)[-len(_END) :]
        if self._tail == _END and self._done is not None and not self._done.done():
            self._done.set_result((self._first, now - self._began))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(exc or ConnectionError("closed"))
