"""Clients that are slow, incomplete, huge, malformed or many break nothing, and do not starve other clients."""

import asyncio
import contextlib
import gc
import json
import tracemalloc

import pytest
from aiohttp import web

from tests.integration.serving_guard.stand import CHAT, COMPLETIONS, begin, many, on_uvloop, standing
from tests.support.waiting import wait_until

POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"


async def status_of(reader: asyncio.StreamReader) -> int:
    return int((await asyncio.wait_for(reader.readline(), 10)).split()[1])


@on_uvloop
async def test_a_slow_reader_slows_its_own_answer_alone() -> None:
    sent = 0

    async def flood(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = await begin(request)
        for _ in range(2000):
            await response.write(b"data: " + b"x" * 65536 + b"\n\n")
            sent += 65536
        return response

    async with standing(buffer_bytes=64 << 10) as stand, many(stand, 1) as [(_, slow)]:
        stand.engine.handler = flood
        slow.transport.pause_reading()  # type: ignore[attr-defined]
        slow.write(POST + b"Content-Length: 2\r\n\r\n{}")
        await wait_until(lambda: sent > 0)
        stand.engine.handler = stand.engine.answer
        before = -1
        while before != sent:  # until nothing moves any more, while others are served
            before = sent
            for _ in range(20):
                assert (await stand.chat())[0] == 200
        (client,) = [one for one in stand.proxy.clients._open if one.is_clogged]
        assert client.transport.get_write_buffer_size() < 1 << 20
        assert sent < 32 << 20  # what the buffers of three sockets take, of 131 MB


@on_uvloop
async def test_an_answer_left_unread_is_given_up() -> None:
    async def flood(request: web.Request) -> web.StreamResponse:
        response = await begin(request)
        while True:
            await response.write(b"data: " + b"x" * 65536 + b"\n\n")

    async with standing(stall_timeout_s=0.2) as stand, many(stand, 1) as [(_, slow)]:
        stand.engine.handler = flood
        slow.transport.pause_reading()  # type: ignore[attr-defined]
        slow.write(POST + b"Content-Length: 2\r\n\r\n{}")
        await wait_until(lambda: stand.engine.broken_off == 1)
        assert stand.counted("clients_cut", "unread") == 1
        assert stand.traffic.outcomes == [False]


@pytest.mark.parametrize(
    "half",
    [
        b"P",
        POST[:-2],
        POST + b"X-A: 1\r\n",
        POST + b"Content-Length: 10\r\n\r\n{",
        POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab",
    ],
)
@on_uvloop
async def test_half_a_request_gets_a_timeout_and_nobody_else_does(half: bytes) -> None:
    async with standing(header_timeout_s=0.2, body_timeout_s=0.2) as stand, many(stand, 50) as halves:
        for _, writer in halves:
            writer.write(half)
        assert (await stand.chat())[0] == 200
        assert [await status_of(reader) for reader, _ in halves] == [408] * 50
        assert stand.engine.asked == 1
        assert len(stand.traffic.of("arrived")) == 1  # half a request is none
        assert stand.counted("refused", "408") == 50


@on_uvloop
async def test_a_client_that_cannot_be_looked_at_leaves_the_others_their_limits() -> None:
    def fail(now: float) -> None:
        raise RuntimeError(f"nobody thought of this at {now}")

    async with standing(header_timeout_s=0.2) as stand, many(stand, 2) as [(broken, first), (half, writer)]:
        await wait_until(lambda: len(stand.proxy.clients) == 2)
        port = first.get_extra_info("sockname")[1]
        (odd,) = [one for one in stand.proxy.clients._open if one.transport.get_extra_info("peername")[1] == port]
        odd.check = fail  # type: ignore[method-assign]
        assert await asyncio.wait_for(broken.read(), 10) == b""
        writer.write(POST)
        assert await status_of(half) == 408


@on_uvloop
async def test_dripping_headers_do_not_put_the_timeout_off() -> None:
    async with standing(header_timeout_s=0.3) as stand, many(stand, 1) as [(reader, writer)]:
        writer.write(POST)
        answer = asyncio.create_task(status_of(reader))
        while not answer.done():
            writer.write(b"X: 1\r\n")
            await asyncio.wait((answer,), timeout=0.05)
        assert await answer == 408


@pytest.mark.parametrize("path", [b"/v1/files", COMPLETIONS.encode()])
@on_uvloop
async def test_a_body_said_to_be_huge_is_refused_at_once(path: bytes) -> None:
    async with standing(max_body_bytes=1 << 20) as stand:
        answer = await stand.say(b"POST %b HTTP/1.1\r\nHost: a\r\nContent-Length: 1048577\r\n\r\n" % path)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"1048576 bytes" in answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == 413
        assert stand.engine.asked == 0


@pytest.mark.parametrize("path", [b"/v1/files", COMPLETIONS.encode()])
@on_uvloop
async def test_a_body_that_turns_out_huge_is_refused_and_never_held(path: bytes) -> None:
    async def drain(request: web.Request) -> web.Response:
        async for _ in request.content.iter_any():
            pass
        return web.Response()

    async with standing(max_body_bytes=32 << 20) as stand, many(stand, 1) as [(reader, writer)]:
        stand.engine.handler = drain
        answer = asyncio.create_task(status_of(reader))
        writer.write(b"POST %b HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" % path)
        piece = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        gc.collect()
        tracemalloc.start()
        try:
            for _ in range(600):
                if answer.done():
                    break
                writer.write(piece)
                await writer.drain()
            assert await answer == 413
            assert tracemalloc.get_traced_memory()[1] < 12 << 20
        finally:
            tracemalloc.stop()
        await stand.told_all()
        assert stand.traffic.outcomes == [False] * (path != b"/v1/files")
        assert (await stand.session.get("/v1/models")).status == 200


@on_uvloop
async def test_an_upload_goes_no_faster_than_the_engine_reads() -> None:
    async def stuck(request: web.Request) -> web.Response:
        await stand.engine.go_on.wait()
        return web.Response(text=str(len(await request.read())))

    async with standing(buffer_bytes=64 << 10) as stand, many(stand, 1) as [(reader, writer)]:
        stand.engine.handler = stuck
        size = 64 << 20
        writer.write(b"POST /v1/files HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % size)
        writer.write(b"x" * size)
        await wait_until(lambda: stand.proxy.pool._open and any(one._paused for one in stand.proxy.clients._open))
        (connection,) = stand.proxy.pool._open
        assert connection.transport.get_write_buffer_size() < 1 << 20
        assert (await stand.session.get("/ebbtide/health")).status == 200
        stand.engine.go_on.set()
        assert await status_of(reader) == 200


@on_uvloop
async def test_clients_that_leave_amid_their_answers_end_them_at_the_engine() -> None:
    async with standing() as stand:
        stand.engine.handler = stand.engine.endless

        async def leaving(number: int) -> None:
            reader, writer = await stand.raw()
            writer.write(POST + b'Content-Length: 15\r\n\r\n{"stream":true}')
            for _ in range(number % 5):
                await reader.readuntil(b"\n\n")
            if number % 2:
                writer.transport.abort()
            writer.close()

        await asyncio.gather(*[leaving(number) for number in range(100)])
        await stand.told_all()
        await wait_until(lambda: stand.engine.broken_off == stand.engine.asked)
        assert set(stand.traffic.outcomes) <= {False}
        await wait_until(lambda: len(stand.proxy.pool) == 0)
        stand.engine.handler = stand.engine.answer
        assert (await stand.chat())[0] == 200


@on_uvloop
async def test_a_thousand_idle_connections_starve_nobody() -> None:
    async with standing() as stand:
        assert (await stand.chat())[0] == 200
        gc.collect()
        tracemalloc.start()
        try:
            async with many(stand, 1000):
                await wait_until(lambda: len(stand.proxy.clients) >= 1000)
                for _ in range(50):
                    assert (await stand.chat())[0] == 200
                assert tracemalloc.get_traced_memory()[0] < 24 << 20  # of both ends, and asyncio's readers
        finally:
            tracemalloc.stop()
        await wait_until(lambda: len(stand.proxy.clients) <= 1)


@on_uvloop
async def test_idle_connections_make_room_and_requests_do_not() -> None:
    async with standing(max_connections=20) as stand:
        stand.engine.handler = stand.engine.hanging
        working = [asyncio.create_task(stand.chat()) for _ in range(5)]
        await wait_until(lambda: stand.engine.asked == 5)
        async with many(stand, 200):
            await wait_until(lambda: stand.counted("clients_cut", "room") >= 185)
            assert len(stand.proxy.clients) <= 20
            stand.engine.go_on.set()
            assert [status for status, _ in await asyncio.gather(*working)] == [200] * 5
            assert (await stand.chat())[0] == 200


@on_uvloop
async def test_when_all_connections_are_busy_a_new_client_is_refused_with_the_reason() -> None:
    async with standing(max_connections=3) as stand:
        stand.engine.handler = stand.engine.hanging
        working = [asyncio.create_task(stand.chat()) for _ in range(3)]
        await wait_until(lambda: stand.engine.asked == 3)
        answer = await stand.say(b"")
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b'"overloaded"' in answer
        stand.engine.go_on.set()
        assert [status for status, _ in await asyncio.gather(*working)] == [200] * 3


@on_uvloop
async def test_one_address_has_its_bound() -> None:
    async with standing(max_per_client=3) as stand, many(stand, 3):
        answer = await stand.say(b"")
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert b"127.0.0.1" in answer


@on_uvloop
async def test_all_of_them_at_once_leave_the_books_right() -> None:
    async with standing(header_timeout_s=0.3, body_timeout_s=0.3, max_connections=200) as stand:
        stand.engine.step_s = 0.002
        stop = asyncio.Event()

        async def hostile(data: bytes, *, reads: int) -> None:
            while not stop.is_set():
                with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                    reader, writer = await stand.raw()
                    writer.write(data)
                    for _ in range(reads):
                        await reader.readline()
                    writer.transport.abort()
                await asyncio.sleep(0)

        chat = b'POST %b HTTP/1.1\r\nHost: a\r\nContent-Length: 15\r\n\r\n{"stream":true}' % CHAT.encode()
        kinds = [
            (chat, 0),
            (chat, 4),
            (chat[:-3], 0),
            (POST + b"X: 1\r\n", 0),
            (b"\xff" * 40, 1),
            (chat * 5, 3),
            (b"", 0),
        ]
        tasks = [asyncio.create_task(hostile(data, reads=reads)) for data, reads in kinds for _ in range(3)]
        for _ in range(100):
            status, body = await stand.chat()
            assert status == 200
            assert body.endswith(b"[DONE]\n\n")
        stop.set()
        await asyncio.gather(*tasks)
        await stand.told_all()
        await wait_until(lambda: len(stand.proxy.clients) <= 1)
        assert stand.counted("listener_failures") == 0
