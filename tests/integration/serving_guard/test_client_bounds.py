"""What clients make the proxy hold, and for how long, has bounds: of each client, and of all clients together."""

import asyncio
import gc
import tracemalloc
from collections.abc import Iterator

import pytest
from aiohttp import web

from ebbtide.serving_guard.proxy import request_timing
from tests.integration.serving_guard.stand import COMPLETIONS, Stand, begin, many, on_uvloop, standing
from tests.support.waiting import wait_until

POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
def traced() -> Iterator[None]:
    gc.collect()
    tracemalloc.start()
    yield
    tracemalloc.stop()


async def settled(stand: Stand, held: int) -> None:
    await wait_until(lambda: sum(one.held_bytes for one in stand.proxy.clients._open) >= held)


@pytest.mark.usefixtures("traced")
@on_uvloop
async def test_a_body_in_tiny_chunks_holds_little_more_than_its_bytes() -> None:
    async with standing() as stand, many(stand, 1) as [(_, writer)]:
        writer.write(CHUNKED + b"2\r\nab\r\n" * 500_000)
        await writer.drain()
        await settled(stand, 1_000_000)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 8 << 20  # of both ends: what the client has sent is 3.5 MB
        assert stand.engine.asked == 0


@pytest.mark.usefixtures("traced")
@on_uvloop
async def test_all_clients_together_hold_no_more_than_their_bound() -> None:
    async with standing(max_held_bytes=4 << 20) as stand, many(stand, 40) as floods:
        for _, writer in floods:
            writer.write(POST + b"Content-Length: 900000\r\n\r\n" + b"x" * 800_000)
        await wait_until(lambda: stand.counted("clients_cut", "memory") >= 35)
        assert sum(one.held_bytes for one in stand.proxy.clients._open) <= 4 << 20
        assert (await stand.chat())[0] == 200  # a small request passes beside them
        refused = [reader for reader, _ in floods if reader._buffer]  # type: ignore[attr-defined]
        assert b"503 " in await refused[0].readline()


@on_uvloop
async def test_answers_left_unread_count_towards_the_bound_and_the_largest_are_cut_first() -> None:
    async def flood(request: web.Request) -> web.StreamResponse:
        response = await begin(request)
        while True:
            await response.write(b"data: " + b"x" * 65536 + b"\n\n")

    async with standing(max_held_bytes=2 << 20) as stand, many(stand, 20) as unread:
        stand.engine.handler = flood
        for reader, writer in unread:
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(POST + b"Content-Length: 2\r\n\r\n{}")
        await wait_until(lambda: stand.counted("clients_cut", "memory") >= 5)
        await wait_until(lambda: sum(one.held_bytes for one in stand.proxy.clients._open) <= 2 << 20)
        stand.engine.handler = stand.engine.answer
        assert (await stand.chat())[0] == 200


@pytest.mark.parametrize("endless", [b"5;name=", b"0\r\nX-Trailer: "], ids=["extension", "trailer"])
@on_uvloop
async def test_what_surrounds_the_chunks_of_a_body_has_a_bound(endless: bytes) -> None:
    async with standing() as stand, many(stand, 1) as [(reader, writer)]:
        writer.write(CHUNKED + endless + b"x" * (2 << 20))
        assert (await asyncio.wait_for(reader.readline(), 10)).split()[1] in {b"400", b"431"}
        assert stand.engine.asked == 0


@on_uvloop
async def test_empty_lines_do_not_keep_a_connection() -> None:
    async with standing(idle_timeout_s=0.3) as stand, many(stand, 1) as [(reader, writer)]:
        closed = asyncio.create_task(reader.read())
        for _ in range(100):
            writer.write(b"\r\n")
            if (await asyncio.wait((closed,), timeout=0.02))[0]:
                break
        assert closed.done()


@pytest.mark.parametrize("path", [b"/v1/files", COMPLETIONS.encode()])
@on_uvloop
async def test_a_body_that_drips_is_refused_though_it_never_pauses(path: bytes) -> None:
    async def drain(request: web.Request) -> web.Response:
        return web.Response(text=str(len(await request.read())))

    async with standing(body_timeout_s=0.3, min_body_rate=10_000) as stand, many(stand, 2) as [slow, fast]:
        stand.engine.handler = drain
        for _, writer in (slow, fast):
            writer.write(b"POST %b HTTP/1.1\r\nHost: a\r\nContent-Length: 20000\r\n\r\n" % path)
        answers = [asyncio.create_task(reader.readline()) for reader, _ in (slow, fast)]
        for number in range(200):
            slow[1].write(b"x")
            if number < 20:
                fast[1].write(b"x" * 1000)
            if not (await asyncio.wait(answers, timeout=0.02))[1]:
                break
        assert [answer.result().split()[1] for answer in answers] == [b"408", b"200"]


@on_uvloop
async def test_a_long_prompt_goes_no_faster_than_the_engine_reads() -> None:
    async def stuck(request: web.Request) -> web.Response:
        await stand.engine.go_on.wait()
        return web.Response(text=str(len(await request.read())))

    async with standing(buffer_bytes=64 << 10, keep_body_bytes=8 << 20) as stand, many(stand, 1) as [(reader, writer)]:
        stand.engine.handler = stuck
        writer.write(CHUNKED + (b"10000\r\n" + b"x" * 65536 + b"\r\n") * 640 + b"0\r\n\r\n")
        await wait_until(lambda: any(one._paused for one in stand.proxy.clients._open))
        before = -1
        while before != (held := sum(one.transport.get_write_buffer_size() for one in stand.proxy.pool._open)):
            before = held
            for _ in range(20):
                assert (await stand.session.get("/ebbtide/health")).status == 200
        assert held < 12 << 20  # of 40 MB: what is kept, and is sent at once
        assert any(one._paused for one in stand.proxy.clients._open)
        stand.engine.go_on.set()
        assert b" 200 " in await asyncio.wait_for(reader.readline(), 10)


@on_uvloop
async def test_answers_kept_for_their_token_counts_have_a_bound_together(monkeypatch: pytest.MonkeyPatch) -> None:
    async def half(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        await response.write(b" " * 6000)
        await stand.engine.go_on.wait()
        return response

    monkeypatch.setattr(request_timing, "_KEPT_ANSWERS", 15_000)
    async with standing() as stand, many(stand, 5) as clients:
        stand.engine.handler = half
        for reader, writer in clients:
            writer.write(POST + b"Content-Length: 2\r\n\r\n{}")
            await reader.readuntil(b" " * 6000)
        assert stand.proxy.listener.kept_bytes == 12_000
        stand.engine.go_on.set()
        await stand.told_all()
        assert stand.proxy.listener.kept_bytes == 0
