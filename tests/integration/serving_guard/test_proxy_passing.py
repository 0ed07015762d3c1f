"""Requests and answers pass through the proxy unchanged."""

import asyncio
import io
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from tests.integration.serving_guard.stand import (
    CHAT,
    COMPLETIONS,
    begin,
    on_uvloop,
    random_bytes,
    scripted,
    standing,
)


@on_uvloop
async def test_method_target_headers_status_and_bodies_pass_untouched() -> None:
    seen: list[tuple[str, str, list[tuple[str, str]], bytes]] = []

    async def handler(request: web.Request) -> web.Response:
        headers = [(name.decode(), value.decode()) for name, value in request.raw_headers]
        seen.append((request.method, request.raw_path, headers, await request.read()))
        answer = web.Response(status=418, reason="Short And Stout", body=b"\x00\xffbytes")
        answer.headers.extend([("X-Twice", "one"), ("X-Twice", "two")])
        return answer

    async with standing() as stand:
        stand.engine.handler = handler
        body = random_bytes(3000)
        answer = await stand.say(
            b"PATCH /odd%2Fpath//x?b=2&a=%20;c HTTP/1.1\r\nHost: a.example\r\nX-Mixed-CASE: v  w\r\nCookie: a\r\n"
            b"Cookie: b\r\nAuthorization: Bearer s\r\nContent-Length: 3000\r\nConnection: close\r\n\r\n" + body
        )
    method, path, headers, received = seen[0]
    assert (method, path, received) == ("PATCH", "/odd%2Fpath//x?b=2&a=%20;c", body)
    assert headers == [
        ("Host", "a.example"), ("X-Mixed-CASE", "v  w"), ("Cookie", "a"), ("Cookie", "b"),
        ("Authorization", "Bearer s"), ("Content-Length", "3000"),
    ]  # fmt: skip
    assert answer.startswith(b"HTTP/1.1 418 Short And Stout\r\n")
    assert answer.endswith(b"\r\n\r\n\x00\xffbytes")
    assert answer.count(b"X-Twice: ") == 2


@on_uvloop
async def test_headers_of_the_connection_stay_on_it() -> None:
    seen: list[list[bytes]] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append([name.lower() for name, _ in request.raw_headers])
        return web.Response(headers={"Keep-Alive": "timeout=5", "X-Stays": "1"}, text="ok")

    async with standing() as stand:
        stand.engine.handler = handler
        answer = await stand.say(
            b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close, X-Secret, Host\r\nX-Secret: 1\r\nTE: trailers\r\n"
            b"Keep-Alive: 3\r\nProxy-Connection: x\r\nX-Stays: 1\r\nUpgrade: h2c\r\nHTTP2-Settings: AAA\r\n\r\n"
        )
    assert seen == [[b"host", b"x-stays"]]
    assert b"x-stays: 1" in answer.lower()
    assert b"keep-alive" not in answer.lower()


@on_uvloop
async def test_a_streamed_answer_comes_event_by_event() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = await begin(request)
        await response.write(b"data: {}\n\n")
        await stand.engine.go_on.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    async with standing() as stand:
        stand.engine.handler = handler
        async with stand.session.post(CHAT, json={"stream": True}) as response:
            assert await response.content.readuntil(b"\n\n") == b"data: {}\n\n"
            stand.engine.go_on.set()  # the engine ends no sooner
            assert await response.read() == b"data: [DONE]\n\n"


@pytest.mark.parametrize("size", [0, 1, 70_000, 5 << 20])
@pytest.mark.parametrize("path", ["/v1/files", COMPLETIONS])
@pytest.mark.parametrize("chunked", [False, True])
@on_uvloop
async def test_bodies_of_any_length_pass_both_ways(size: int, path: str, chunked: bool) -> None:
    async def echo(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(await request.read())
        return response

    async with standing() as stand:
        stand.engine.handler = echo
        body = random_bytes(size)

        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, size, 60_000):
                yield body[start : start + 60_000]

        async with stand.session.post(path, data=pieces() if chunked else io.BytesIO(body)) as response:
            assert await response.read() == body
        await stand.told_all()
        assert len(stand.traffic.of("arrived")) == (path == COMPLETIONS)


@on_uvloop
async def test_answers_without_a_body_end_where_they_should() -> None:
    async def handler(request: web.Request) -> web.Response:
        status = int(request.path[1:])
        return web.Response(status=status) if status != 200 else web.Response(body=b"12345")

    async with standing() as stand:
        stand.engine.handler = handler
        for status in (204, 304, 200):
            async with stand.session.get(f"/{status}") as response:
                assert (response.status, await response.read()) == (status, b"12345" if status == 200 else b"")
            async with stand.session.head(f"/{status}") as response:
                assert response.status == status
                assert status != 200 or response.headers["Content-Length"] == "5"


@on_uvloop
async def test_an_older_client_gets_a_plain_body_and_its_end() -> None:
    async with standing() as stand:
        body = b'{"stream": true}'
        answer = await stand.say(b"POST %s HTTP/1.0\r\nContent-Length: 16\r\n\r\n%s" % (CHAT.encode(), body))
        head, _, events = answer.partition(b"\r\n\r\n")
        assert b"Connection: close" in head
        assert b"chunked" not in head
        assert events.startswith(b"data: {")
        assert events.endswith(b"}\n\ndata: [DONE]\n\n")


@on_uvloop
async def test_an_answer_may_come_interim_and_end_with_its_connection() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nX-A: 1\r\n\r\nuntil ")
        writer.write(b"the end")

    async with scripted(serve) as url, standing(url) as stand, stand.session.get("/") as response:
        assert (response.status, response.headers["X-A"], await response.read()) == (200, "1", b"until the end")
        assert "Link" not in response.headers


@on_uvloop
async def test_an_expectation_is_answered_before_the_body_comes() -> None:
    async with standing() as stand:
        reader, writer = await stand.raw()
        writer.write(b"POST /x HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"abc")
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        writer.close()
