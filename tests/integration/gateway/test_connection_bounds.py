"""What a connection may send outside of the body that is being read: on real sockets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import pytest

from ebbtide.gateway.access import RequestLimits
from ebbtide.gateway.http.server import HttpServer
from tests.integration.gateway.test_http_server import answer, connected, serving

POST: Final = b"POST / HTTP/1.1\r\nhost: x\r\n"
#: What the kernel and the server hold unread is far below.
MOST: Final = 64 << 20
CHUNKED: Final = POST + b"transfer-encoding: chunked\r\n\r\n"


@asynccontextmanager
async def sending(server: HttpServer, first: bytes) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await connected(server)
    writer.write(first)
    try:
        async with asyncio.timeout(20):
            yield reader, writer
    finally:
        writer.close()


async def read_all(_scope: Any, receive: Any, send: Any) -> None:
    while (message := await receive())["type"] == "http.request" and message["more_body"]:
        pass
    await answer(_scope, receive, send)


async def refused(scope: Any, receive: Any, send: Any) -> None:
    """Answers without the body, as a request without a key is answered."""
    await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"no"})


async def is_cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, piece: bytes) -> bool:
    """Whether the server closes while pieces are sent, at most `MOST` bytes of them."""
    with suppress(ConnectionError):
        for _ in range(MOST // len(piece)):
            if reader.at_eof():
                return True
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        return reader.at_eof()
    return True


@pytest.mark.parametrize("piece", [b"x-more: y\r\n" * 1000, b"y" * 10_000])
@pytest.mark.parametrize("app", [read_all, refused])
async def test_trailers_without_end_are_cut(app: Any, piece: bytes) -> None:
    limits = RequestLimits(header_bytes=4096, body_bytes=64 << 10)
    async with serving(app, limits=limits) as server, sending(server, CHUNKED + b"0\r\nx-first: ") as (reader, writer):
        assert await is_cut(reader, writer, piece)


async def test_a_chunks_extension_without_end_is_cut() -> None:
    limits = RequestLimits(header_bytes=4096)
    async with serving(read_all, limits=limits) as server, sending(server, CHUNKED + b"5;x=") as (reader, writer):
        assert await is_cut(reader, writer, b"y" * 10_000)


async def test_a_trailer_is_no_header() -> None:
    seen: list[tuple[bytes, bytes]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await read_all(scope, receive, send)
        seen.extend(scope["headers"])

    body = b"3\r\nabc\r\n0\r\nauthorization: Bearer x\r\n\r\n"
    async with serving(app) as server, sending(server, CHUNKED + body) as (reader, _):
        assert b"200" in await reader.readline()
    assert dict(seen) == {b"host": b"x", b"transfer-encoding": b"chunked"}


async def test_a_body_behind_its_answer_has_bounded_bytes() -> None:
    limits = RequestLimits(header_bytes=4096, body_bytes=64 << 10)
    async with serving(refused, limits=limits) as server, sending(server, CHUNKED) as (reader, writer):
        assert b"401" in await reader.readline()
        assert await is_cut(reader, writer, b"400\r\n" + b"x" * 0x400 + b"\r\n")


async def test_a_body_behind_its_answer_has_bounded_time() -> None:
    limits = RequestLimits(body_s=0.05)
    async with serving(refused, limits=limits) as server, sending(server, CHUNKED) as (reader, _):
        assert b"401" in await reader.read()


async def test_after_the_rest_of_an_answered_body_the_connection_serves_on() -> None:
    async with serving(refused) as server, sending(server, POST + b"content-length: 9\r\n\r\n") as (reader, writer):
        for _ in range(2):
            assert (await reader.readuntil(b"\r\n\r\nno")).startswith(b"HTTP/1.1 401")
            writer.write(b"x" * 9 + POST + b"content-length: 9\r\n\r\n")


async def test_what_is_sent_ahead_does_not_cut_the_present_answer() -> None:
    began, goes_on, limits = asyncio.Event(), asyncio.Event(), RequestLimits(header_s=0.05, header_bytes=4096)

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        began.set()
        await goes_on.wait()
        await answer(scope, receive, send)

    async with (
        serving(slow, limits=limits) as server,
        sending(server, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n") as (
            reader,
            writer,
        ),
    ):
        await began.wait()
        writer.write(b"\r\n")
        with pytest.raises(TimeoutError):  # longer than a head has: the stream must outlive it
            await asyncio.wait_for(reader.read(1), 0.3)
        writer.write(b"GET / HT")
        goes_on.set()
        assert (await reader.read()).endswith(b"\r\n\r\nok")  # and the next head has its time from here on


async def test_whoever_holds_all_connections_idle_makes_room_for_a_request() -> None:
    began, goes_on = asyncio.Event(), asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/slow":
            began.set()
            await goes_on.wait()
        await answer(scope, receive, send)

    limits = RequestLimits(requests=1)
    async with serving(slow, limits=limits) as server:
        async with sending(server, b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n") as (under_way, _):
            await began.wait()
            held = [await connected(server) for _ in range(limits.connections + 20)]
            for number in range(3):
                async with sending(server, b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % number) as (reader, _):
                    assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
            first = held[0][0]
            with suppress(ConnectionError):
                assert await first.read() == b"", "the one that was idle for longest went"
            goes_on.set()
            assert (await under_way.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        for _, writer in held:
            writer.close()
