"""One plain transfer over a link: the yardstick of all others."""

import asyncio
import time

from tests.shaped_link import ShapedLink


async def one_transfer(size: int, bytes_per_s: float, latency_s: float) -> float:
    """Seconds from the request for `size` bytes until the last has come, over one connection of such a link."""
    block = bytes(1 << 16)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1)
        for start in range(0, size, len(block)):
            writer.write(block[: size - start])
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server, ShapedLink(f"{host}:{port}", bytes_per_s, latency_s) as link:
        host, _, port = link.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        start, left = time.monotonic(), size
        writer.write(b"x")
        while left:
            left -= len(await reader.read(1 << 18))
        writer.close()
        return time.monotonic() - start
