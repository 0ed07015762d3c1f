"""The proxy handles engines that fail, clients that leave, health checks and its own end."""

import asyncio
import json
import socket
import time

import aiohttp
import pytest
from aiohttp import web

from ebbtide.errors import InvalidRequest
from ebbtide.serving_guard.proxy import engine_connections
from ebbtide.serving_guard.proxy.proxy import Proxy
from ebbtide.serving_guard.settings import ProxySettings
from tests.integration.serving_guard.stand import (
    CHAT,
    COMPLETIONS,
    Recorded,
    begin,
    many,
    on_uvloop,
    random_bytes,
    scripted,
    standing,
)
from tests.support.waiting import wait_until


@on_uvloop
async def test_an_engine_that_is_not_there_is_named() -> None:
    async with standing("http://127.0.0.1:9") as stand:
        status, body = await stand.chat()
        error = json.loads(body)["error"]
        assert status == error["code"] == 502
        assert error["type"] == "upstream_unreachable"
        assert "http://127.0.0.1:9" in error["message"]
        assert stand.traffic.outcomes == [False]


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\nConte", b"SSH-2.0-OpenSSH\r\n"])
@on_uvloop
async def test_an_engine_that_fails_before_its_answer_is_named(answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)

    async with scripted(serve) as url, standing(url) as stand:
        status, body = await stand.chat()
        assert status == 502
        assert json.loads(body)["error"]["type"] == "upstream_failed"
        assert stand.traffic.outcomes == [False]


@on_uvloop
async def test_an_answer_cut_short_is_seen_as_such() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(b"a\r\ndata: {}\n\n\r\n")

    async with scripted(serve) as url, standing(url) as stand:
        with pytest.raises((aiohttp.ClientPayloadError, aiohttp.ClientConnectionError)):
            await stand.chat()
        await stand.told_all()
        assert stand.traffic.outcomes == [False]


@on_uvloop
async def test_a_client_that_leaves_ends_its_request_at_the_engine() -> None:
    async with standing() as stand:
        stand.engine.handler = stand.engine.endless
        async with stand.session.post(CHAT, json={"stream": True}) as response:
            await response.content.readuntil(b"\n\n")
            response.close()
        await wait_until(lambda: stand.engine.broken_off == 1, timeout=1.0)
        assert stand.traffic.outcomes == [False]


@on_uvloop
async def test_a_client_that_leaves_before_the_first_token_does_so_too() -> None:
    async with standing() as stand:
        stand.engine.handler = stand.engine.hanging
        task = asyncio.create_task(stand.chat())
        await wait_until(lambda: stand.engine.asked == 1)
        task.cancel()
        await wait_until(lambda: stand.engine.broken_off == 1, timeout=1.0)
        assert stand.traffic.outcomes == [False]


@on_uvloop
async def test_a_kept_connection_that_the_engine_closed_costs_no_request() -> None:
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await reader.readuntil(b"\r\n\r\n")  # the next one it reads, and closes without a word

    async with scripted(serve) as url, standing(url) as stand:
        for _ in range(3):
            async with stand.session.get("/") as response:
                assert (response.status, await response.read()) == (200, b"ok")
        assert connections == 3


@on_uvloop
async def test_connections_to_the_engine_are_kept() -> None:
    async with standing() as stand:
        for _ in range(20):
            assert (await stand.chat())[0] == 200
        assert stand.counted("engine_connects") == 1


@on_uvloop
async def test_every_client_gets_its_own_answer() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        response = await begin(request)
        for start in range(0, len(body), 7919):
            await response.write(body[start : start + 7919])
            await asyncio.sleep(0)
        return response

    async with standing() as stand:
        stand.engine.handler = handler

        async def one(number: int) -> bool:
            body = random_bytes(1 + number * 397, seed=number)
            async with stand.session.post(COMPLETIONS, data=body) as response:
                return await response.read() == body

        assert all(await asyncio.gather(*[one(number) for number in range(100)]))


@on_uvloop
async def test_websockets_get_a_clear_answer() -> None:
    async with standing() as stand:
        answer = await stand.say(
            b"GET /v1/realtime HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: x\r\n\r\n"
        )
        assert answer.startswith(b"HTTP/1.1 501 ")
        assert b"websockets do not pass" in answer
        assert stand.engine.asked == 0


@on_uvloop
async def test_health_is_that_of_the_way_to_the_engine() -> None:
    async with standing() as stand:
        async with stand.session.get("/ebbtide/health") as response:
            assert (response.status, await response.json()) == (200, {"status": "ok"})
        await stand.engine.stop()

        async def failing() -> bool:
            async with stand.session.get("/ebbtide/health") as response:
                return response.status == 503 and "cannot be reached" in await response.text()

        await wait_until(failing, timeout=5.0)
        await stand.engine.start(stand.engine.port)
        await wait_until(lambda: stand.session.get("/ebbtide/health"))
        assert stand.engine.asked == 0


@on_uvloop
async def test_what_is_under_way_ends_before_the_proxy_does() -> None:
    async with standing(drain_s=10.0) as stand:
        stand.engine.handler = stand.engine.hanging
        request = asyncio.create_task(stand.chat())
        await wait_until(lambda: stand.engine.asked == 1)
        stop = asyncio.create_task(stand.proxy.stop())
        await wait_until(lambda: stand.proxy.clients.draining)
        with pytest.raises(ConnectionRefusedError):
            await stand.raw()
        stand.engine.go_on.set()
        assert (await request)[0] == 200
        await stop


@pytest.mark.parametrize("url", ["https://a:1", "127.0.0.1:8000", "http://a:1/path", "http://a:x", "http://"])
def test_an_upstream_that_cannot_be_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="upstream"):
        Proxy(ProxySettings(), url, Recorded())


@on_uvloop
async def test_a_post_that_the_engine_may_have_read_is_not_sent_again() -> None:
    asked = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await reader.readuntil(b"\r\n\r\n")
        asked += 1  # it breaks in the middle of it

    async with scripted(serve) as url, standing(url) as stand:
        assert (await stand.session.get("/")).status == 200
        status, body = await stand.chat()
        assert (status, json.loads(body)["error"]["type"]) == (502, "upstream_failed")
        assert asked == 1


@on_uvloop
async def test_a_kept_connection_is_not_used_once_the_engine_has_closed_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as engine:
        pool = engine_connections.EnginePool(f"http://127.0.0.1:{engine.getsockname()[1]}", ProxySettings())
        kept = await pool.connect()
        kept.idle_since = time.monotonic()
        pool.put(kept)
        assert pool.idle() is kept
        pool.put(kept)
        engine.accept()[0].close()
        assert pool.idle() is None  # though the event loop has not read its end yet
        await pool.empty.wait()


@on_uvloop
async def test_an_answer_without_its_body_leaves_no_connection_waiting_for_one() -> None:
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while head := await reader.readuntil(b"\r\n\r\n"):
            body = b"" if head.startswith(b"HEAD") else b"hello"
            writer.write(b"HTTP/1.1 405 No\r\nContent-Length: %d\r\n\r\n%b" % (len(body) or 1000, body))

    async with scripted(serve) as url, standing(url) as stand, many(stand, 1) as [(reader, writer)]:
        for method in (b"HEAD", b"GET", b"GET"):
            writer.write(b"%b / HTTP/1.1\r\nHost: a\r\n\r\n" % method)
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
            assert (b"Content-Length: 1000" in head) == (method == b"HEAD")
            if method == b"GET":
                assert await asyncio.wait_for(reader.readexactly(5), 10) == b"hello"
        assert connections == 2


class Deaf:
    """Records why its answers broke."""

    head_only = False

    def __init__(self) -> None:
        self.ends: list[str] = []

    def answered(self, status: int, reason: bytes, headers: list[tuple[bytes, bytes]]) -> None: ...

    def passed(self, data: bytes, *, last: bool) -> None: ...

    def broken(self, reason: str, *, stale: bool) -> None:
        assert not stale
        self.ends.append(reason)

    def pause(self) -> None: ...

    def resume(self) -> None: ...


@on_uvloop
async def test_a_request_on_a_connection_that_is_already_lost_is_broken() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with scripted(serve) as url:
        pool, asker = engine_connections.EnginePool(url, ProxySettings(keep_upstream_s=1.0)), Deaf()
        connection = await pool.connect()
        connection.transport.abort()
        await pool.empty.wait()
        connection.ask(asker, b"GET / HTTP/1.1\r\n\r\n")
        await wait_until(lambda: len(asker.ends) == 1)


@on_uvloop
async def test_an_unexpected_failure_to_connect_ends_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(pool: engine_connections.EnginePool) -> engine_connections.EngineConnection:
        raise RuntimeError(f"unexpected failure to connect to {pool.url}")

    async with standing() as stand:
        with monkeypatch.context() as patched:
            patched.setattr(engine_connections.EnginePool, "connect", failing)
            status, body = await stand.chat()
        assert (status, json.loads(body)["error"]["type"]) == (502, "upstream_failed")
        assert stand.traffic.outcomes == [False]
        assert (await stand.chat())[0] == 200
