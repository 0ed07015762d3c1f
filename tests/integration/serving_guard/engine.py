"""Imitates a serving engine: it streams tokens at the test's pace, and answers with metrics like vLLM."""

import asyncio
import json
from types import TracebackType
from typing import Self

PIECE = b'data: {"choices":[{"text":"x"}]}\n\n'


class ServingEngine:
    """Answers have `tokens`, the first after `first_s` and the others `gap_s` apart. `metrics` None: they fail."""

    def __init__(self) -> None:
        self.tokens, self.first_s, self.gap_s = 3, 0.0, 0.0
        self.go = asyncio.Event()  # no answer begins while it is not set
        self.go.set()
        self.metrics: str | None = metrics_text(0, 0)
        self.asked = self._port = 0
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def at(self, port: int) -> Self:
        """Listen on this port instead of any free one."""
        self._port = port
        return self

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.go.set()
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
                await reader.readexactly(int(fields.get(b"content-length", 0)))
                await (self._tell(writer) if head.startswith(b"GET") else self._answer(writer))
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _tell(self, writer: asyncio.StreamWriter) -> None:
        self.asked += 1
        status, body = ("200 OK", self.metrics) if self.metrics is not None else ("500 Broken", "")
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())

    async def _answer(self, writer: asyncio.StreamWriter) -> None:
        await self.go.wait()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for number in range(self.tokens):
            await asyncio.sleep(self.gap_s if number else self.first_s)
            writer.write(_chunk(PIECE))
            await writer.drain()
        writer.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def metrics_text(
    running: int, waiting: int, *, ended: int = 0, kv: float = 0.0, ttft: dict[float, int] | None = None
) -> str:
    """An answer of vLLM's /metrics, with what the guard reads. `ttft`: cumulative counts by upper bound."""
    labels = 'engine="0",model_name="m"'
    lines = [
        f"vllm:num_requests_running{{{labels}}} {running}.0",
        f"vllm:num_requests_waiting{{{labels}}} {waiting}.0",
        f"vllm:kv_cache_usage_perc{{{labels}}} {kv}",
        f'vllm:request_success_total{{{labels},finished_reason="stop"}} {ended}.0',
    ]
    for bound, count in (ttft or {}).items():
        le = "+Inf" if bound == float("inf") else bound
        lines.append(f'vllm:time_to_first_token_seconds_bucket{{{labels},le="{le}"}} {count}.0')
    return "\n".join(["# HELP vllm:num_requests_running x", *lines, ""])


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def ask(url: str, *, prompt: str = "hello") -> bytes:
    """Request one streamed completion at `url` (http://HOST:PORT), and read it to its end."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({"model": "m", "prompt": prompt, "stream": True}).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    try:
        return await reader.read()
    finally:
        writer.close()
