"""What the benchmark of open streams makes of bytes and times, and that its workers and clients follow their orders."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from benchmarks.gateway.lean_http import Connection, EventStream, request
from benchmarks.gateway.stream_workers import StreamFleet
from benchmarks.gateway.unary_calls import joined, unary_figures, worst
from benchmarks.scale.loop_probe import LoopProbe
from ebbtide.types.tokens import unpack_tokens

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class Sink:
    """A transport that takes what is written."""

    def __init__(self) -> None:
        self.written, self.aborted = b"", False

    def write(self, data: bytes) -> None:
        self.written += data

    def abort(self) -> None:
        self.aborted = True


async def stream_of(*parts: bytes) -> EventStream:
    stream = EventStream(b"asked", [])
    stream.connection_made(sink := Sink())
    assert sink.written == b"asked"
    for part in parts:
        stream.data_received(part)
    return stream


@pytest.mark.parametrize("cut", [1, len(HEAD) - 1, len(HEAD) + 8, len(HEAD) + 12])
async def test_events_are_counted_wherever_the_bytes_are_cut(cut: int) -> None:
    whole = HEAD + b"a\r\ndata: 1\n\n\r\na\r\ndata: 2\n\n\r\n0\r\n\r\n"
    stream = await stream_of(whole[:cut], whole[cut:])
    assert stream.events == 2
    assert stream.first.result() == "open"
    assert stream.over.is_set()


async def test_a_refused_stream_tells_why() -> None:
    stream = await stream_of(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 4\r\n\r\nwait")
    assert stream.first.result() == "429: wait"


async def test_a_stream_that_is_lost_before_an_event_is_told_of() -> None:
    stream = await stream_of()
    stream.connection_lost(None)
    assert stream.first.result() == "lost: None"
    assert stream.over.is_set()


async def test_a_call_is_answered_on_a_kept_connection() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for number in range(2):
            await reader.readuntil(b"}")
            body = json.dumps({"number": number}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        connection = await Connection.open(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        answers = [await connection.ask(request("POST", "/tokenize", "key", {"prompt": "x"})) for _ in range(2)]
        connection.close()
    assert [json.loads(one.body)["number"] for one in answers] == [0, 1]
    assert {one.status for one in answers} == {200}


def test_the_worst_kind_of_call_counts() -> None:
    few = joined([{"models": [0.1] * 50, "tokenize": [0.002] * 50}] * 2)
    many = joined([{"models": [0.1] * 50, "tokenize": [0.002] * 48 + [0.008] * 2}] * 2)
    figures = unary_figures(few, many)
    assert figures["tokenize"] == {
        "calls": [100, 100],
        "p50_ms": [2.0, 2.0],
        "p50_over": 1.0,
        "p99_ms": [2.0, 8.0],
        "p99_over": 4.0,
    }
    assert worst(figures, "p99_over") == 4.0


async def test_workers_generate_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EBBTIDE_TOKEN", "a token")
    worker: Any = StreamFleet("127.0.0.1:1", np.arange(100, 120), 3)._made("w1", 8)
    made = unpack_tokens(worker._response(5, 8))
    assert made["id"].tolist() == [105, 106, 107]
    assert set(made["version"].tolist()) == {3}
    await worker._channel.close()


def test_what_a_transport_calls_counts_as_a_callback() -> None:
    probe = LoopProbe()
    assert probe.watched(sum)([1, 2]) == 3
    assert probe.read()["longest"][0]["name"] == "sum"
