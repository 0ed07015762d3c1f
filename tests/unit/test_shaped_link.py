"""The slow link of tests passes bytes on unchanged, at its rate and behind its latency, and can be cut and frozen."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from tests.shaped_link import ShapedLink
from tests.support.waiting import wait_until

KIB = 1 << 10


@pytest.fixture
async def echo() -> AsyncIterator[str]:
    """The address of a server that sends everything back."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(KIB):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


async def connect(link: ShapedLink) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = link.address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def test_bytes_come_back_whole_and_are_counted(echo: str) -> None:
    async with ShapedLink(echo) as link:
        reader, writer = await connect(link)
        data = bytes(range(256)) * 4 * KIB
        writer.write(data)
        writer.write_eof()
        assert await reader.read(-1) == data
        assert (link.sent, link.received) == (len(data), len(data))
        writer.close()


async def test_it_keeps_its_rate_over_all_connections(echo: str) -> None:
    async with ShapedLink(echo, bytes_per_s=2000 * KIB) as link:
        start = time.monotonic()
        both = [await connect(link) for _ in range(2)]
        for _, writer in both:
            writer.write(bytes(500 * KIB))
            writer.write_eof()
        await asyncio.gather(*(reader.read(-1) for reader, _ in both))
        assert time.monotonic() - start == pytest.approx(0.5, rel=0.25)
        for _, writer in both:
            writer.close()


async def test_its_latency_counts_each_way_and_costs_no_rate(echo: str) -> None:
    async with ShapedLink(echo, latency_s=0.1) as link:
        reader, writer = await connect(link)
        start = time.monotonic()
        writer.write(bytes(5000 * KIB))
        writer.write_eof()
        assert len(await reader.read(-1)) == 5000 * KIB
        assert 0.2 <= time.monotonic() - start < 0.6
        writer.close()


async def test_a_frozen_link_lets_nothing_pass_until_it_thaws(echo: str) -> None:
    async with ShapedLink(echo) as link:
        reader, writer = await connect(link)
        link.freeze()
        writer.write(b"late")
        answer = asyncio.create_task(reader.readexactly(4))
        await asyncio.wait({answer}, timeout=0.1)
        assert not answer.done()
        assert link.sent == 0
        link.thaw()
        assert await answer == b"late"
        writer.close()


async def test_a_cut_link_breaks_connections_until_it_is_mended(echo: str) -> None:
    async with ShapedLink(echo) as link:
        reader, writer = await connect(link)
        writer.write(b"x")
        await reader.readexactly(1)
        link.cut()
        await wait_until(lambda: reader.at_eof() or reader.exception(), what="the break")
        writer.close()
        link.mend()
        reader, writer = await connect(link)
        writer.write(b"y")
        assert await reader.readexactly(1) == b"y"
        writer.close()
