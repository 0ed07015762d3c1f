"""Requests that are malformed, endless or ambiguous are refused with the reason, and no part of them passes."""

import asyncio
import json

import pytest
from aiohttp import web

from tests.integration.serving_guard.stand import many, on_uvloop, standing
from tests.support.waiting import wait_until

POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"


@pytest.mark.parametrize(
    "head",
    [
        POST + b"".join(b"X-%d: 1\r\n" % number for number in range(200)),
        POST + b"X-Long: " + b"x" * 100_000 + b"\r\n",
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: a\r\n",
        POST + b"X" * 200_000,
        b"GET /" + b"x" * 200_000,
    ],
    ids=["many", "long", "target", "endless name", "endless target"],
)
@on_uvloop
async def test_floods_of_headers_are_refused(head: bytes) -> None:
    async with standing() as stand:
        answer = await stand.say(head + b"\r\n")
        assert answer.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 "))
        assert stand.engine.asked == 0
        assert (await stand.chat())[0] == 200


SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.mark.parametrize(
    "request_bytes",
    [
        POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
        POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n" + SMUGGLED,
        POST + b"Content-Length: 0\r\nContent-Length: 35\r\n\r\n" + SMUGGLED,
        POST + b"Content-Length: 0, 35\r\n\r\n" + SMUGGLED,
        POST + b"Content-Length: +0\r\n\r\n" + SMUGGLED,
        POST + b"Content-Length: -1\r\n\r\n" + SMUGGLED,
        POST + b"Content-Length: 99999999999999999999\r\n\r\n" + SMUGGLED,
        POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
        POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n" + SMUGGLED,
        POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
        POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
        POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n\r\n" + SMUGGLED,
        POST + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n\r\n" + SMUGGLED,
        POST + b"Transfer-Encoding: chunked\r\n\r\n1ffffffffffffffff\r\n" + SMUGGLED,
        POST + b"X: a\rGET /smuggled HTTP/1.1\r\n\r\n" + SMUGGLED,
        POST + b"X: a\0b\r\n\r\n" + SMUGGLED,
        POST + b"X: a\nContent-Length: 3\r\n continued\r\n\r\n" + SMUGGLED,
        POST + b"Bad Name: a\r\n\r\n" + SMUGGLED,
        POST + b"No-Colon\r\n\r\n" + SMUGGLED,
        POST + b" X: folded\r\n\r\n" + SMUGGLED,
        POST + b"Host: b\r\n\r\n" + SMUGGLED,
        b"GET / HTTP/1.1\r\n\r\n" + SMUGGLED,
        b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
        b"GET / HTTP/3.0\r\nHost: a\r\n\r\n" + SMUGGLED,
        b"GET /a b HTTP/1.1\r\nHost: a\r\n\r\n" + SMUGGLED,
        b"GET nonsense HTTP/1.1\r\nHost: a\r\n\r\n" + SMUGGLED,
        b"GET /a#b HTTP/1.1\r\nHost: a\r\n\r\n" + SMUGGLED,
        b"GET http://user@a/ HTTP/1.1\r\nHost: a\r\n\r\n" + SMUGGLED,
        b"GARBAGE\r\n\r\n" + SMUGGLED,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + SMUGGLED,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SMUGGLED,
        b"CONNECT other:443 HTTP/1.1\r\nHost: other:443\r\n\r\n" + SMUGGLED,
    ],
)
@on_uvloop
async def test_what_two_hosts_could_read_in_two_ways_is_refused(request_bytes: bytes) -> None:
    async with standing() as stand:
        answer = await stand.say(request_bytes)
        assert answer.split(b" ")[1] in {b"400", b"413", b"501", b"505"}
        assert answer.count(b"\r\n\r\n") == 1
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
        assert stand.engine.asked == 0
        assert stand.traffic.calls == []


@on_uvloop
async def test_no_header_is_injected_by_a_target() -> None:
    seen: list[tuple[str, list[str]]] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append((request.raw_path, list(request.headers)))
        return web.Response()

    async with standing() as stand:
        stand.engine.handler = handler
        await stand.say(b"GET http://evil/a%20HTTP/1.1%0dX:%201?b HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert seen == [("/a%20HTTP/1.1%0dX:%201?b", ["Host"])]


@on_uvloop
async def test_trailers_do_not_become_headers() -> None:
    seen: list[list[str]] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(list(request.headers))
        assert await request.read() == b"{}"
        return web.Response()

    trailers = b"Host: evil\r\nAuthorization: Bearer other\r\nX-User: admin\r\n\r\n"
    async with standing() as stand:
        stand.engine.handler = handler
        for path in (b"/v1/completions", b"/v1/files"):
            answer = await stand.say(
                b"POST %b HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n" % path
                + b"2\r\n{}\r\n0\r\n" + trailers
            )  # fmt: skip
            assert answer.startswith(b"HTTP/1.1 200 ")
        assert seen == [["Host", "Content-Length"], ["Host", "Transfer-Encoding"]]


@pytest.mark.parametrize(
    ("target", "host", "path"),
    [
        (b"http://b:81/x?y", "b:81", "/x?y"),
        (b"HTTP://b", "b", "/"),
        (b"http://b?to=/v1/files", "b", "/?to=/v1/files"),
    ],
)
@on_uvloop
async def test_a_url_as_target_determines_host_and_path(target: bytes, host: str, path: str) -> None:
    seen: list[tuple[str, str]] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append((request.headers["Host"], request.raw_path))
        return web.Response()

    async with standing() as stand:
        stand.engine.handler = handler
        await stand.say(b"GET %b HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n" % target)
        assert seen == [(host, path)]


@on_uvloop
async def test_pipelined_requests_are_answered_in_their_order() -> None:
    async def handler(request: web.Request) -> web.Response:
        if request.path == "/0":
            await stand.engine.go_on.wait()
        return web.Response(text=f"answer{request.path}")

    async with standing() as stand, many(stand, 1) as [(reader, writer)]:
        stand.engine.handler = handler
        writer.write(b"".join(b"GET /%d HTTP/1.1\r\nHost: a\r\n\r\n" % number for number in range(10)))
        await wait_until(lambda: stand.engine.asked == 1)
        assert len(stand.proxy.pool) == 1
        stand.engine.go_on.set()
        for number in range(10):
            await reader.readuntil(b"answer/%d" % number)
        writer.write(b"GET /last HTTP/1.1\r\nHost: a\r\n\r\nnonsense\r\n\r\n")
        await reader.readuntil(b"answer/last")
        assert b"HTTP/1.1 400 " in await reader.read()


@on_uvloop
async def test_a_client_is_asked_for_its_body_when_its_turn_comes() -> None:
    async with standing() as stand, many(stand, 1) as [(reader, writer)]:
        stand.engine.handler = stand.engine.hanging
        writer.write(b"GET /first HTTP/1.1\r\nHost: a\r\n\r\n")
        writer.write(POST + b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n")
        await wait_until(lambda: stand.engine.asked == 1)
        stand.engine.go_on.set()
        before = await asyncio.wait_for(reader.readuntil(b"HTTP/1.1 100 Continue\r\n\r\n"), 10)
        assert before.startswith(b"HTTP/1.1 200 ")
        writer.write(b"{}")
        assert (await asyncio.wait_for(reader.readline(), 10)).startswith(b"HTTP/1.1 200 ")


@on_uvloop
async def test_a_flood_of_pipelined_requests_is_cut_off() -> None:
    async with standing() as stand, many(stand, 1) as [(_, writer)]:
        stand.engine.handler = stand.engine.hanging
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 100_000)
        await wait_until(lambda: stand.engine.asked == 1)
        await wait_until(lambda: stand.counted("refused", "429") == 1)
        (client,) = stand.proxy.clients._open
        assert len(client._queue) <= 64
        assert stand.engine.asked == 1


@on_uvloop
async def test_what_comes_behind_a_refusal_is_not_read() -> None:
    async with standing() as stand:
        answer = await stand.say(b"GET / HTTP/1.1\r\n\r\n" + b"POST / HTTP/1.1\r\nHost: a\r\n\r\n" * 100)
        assert answer.count(b"HTTP/1.1 ") == 1
        assert stand.engine.asked == 0
