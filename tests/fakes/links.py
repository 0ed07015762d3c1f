"""A way between two programs, in this process: it forwards, delays, falls silent in one or both directions, or is cut.

Invariant: bytes come out in the order they went in, none twice, and those of a connection that is cut not at all. A
direction that is held still reads a little, as a network would: its sender learns nothing.
"""

import asyncio
import math
import time
from collections.abc import Callable
from typing import Final, Self

#: Bytes read at once, and how many such pieces of a connection a direction that is held has read at most.
_CHUNK: Final = 1 << 16
_AHEAD: Final = 16


class Direction:
    """One of a way's two. `passed`: bytes forwarded by all connections; `waiting`: read and not forwarded."""

    def __init__(self) -> None:
        self.passed = self.waiting = 0
        self.limit = math.inf  # held before more than so many bytes have passed
        self.delay: Callable[[], float] = lambda: 0.0  # seconds that a piece takes at least
        self._holds = 0
        self._open = asyncio.Event()
        self._open.set()

    @property
    def silent(self) -> bool:
        """Whether something waits that is not let through."""
        return self.waiting > 0 and self._holds > 0

    @property
    def held(self) -> bool:
        return self._holds > 0

    def hold(self) -> None:
        """Let nothing through until each `hold` was followed by a `release`."""
        self._holds += 1
        self._open.clear()

    def release(self) -> None:
        self._holds -= 1
        if not self._holds:
            self._open.set()

    async def carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        """Forward one connection to its end. What was read and is not through when this is cancelled is lost."""
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_AHEAD)
        async with asyncio.TaskGroup() as group:
            forwarding = group.create_task(self._forward(pieces, sink))
            due = 0.0
            while data := await source.read(_CHUNK):
                due = max(due, time.monotonic() + self.delay())
                await pieces.put((due, data))
                self.waiting += len(data)
            await pieces.put((due, b""))
            await forwarding

    async def _forward(self, pieces: asyncio.Queue[tuple[float, bytes]], sink: asyncio.StreamWriter) -> None:
        data = b""
        try:
            while True:
                due, data = await pieces.get()
                await asyncio.sleep(due - time.monotonic())
                if self.passed + len(data) > self.limit:
                    self.limit = math.inf
                    self.hold()
                await self._open.wait()
                if not data:
                    break
                sink.write(data)
                self.waiting -= len(data)
                self.passed += len(data)
                data = b""
                await sink.drain()
        finally:
            rest = [data, *(pieces.get_nowait()[1] for _ in range(pieces.qsize()))]
            self.waiting -= sum(map(len, rest))
            sink.close()


class Way:
    """From those who connect to `address` (`forth`) to `target` and `back`. Made by `open`."""

    def __init__(self, target: str) -> None:
        self._target = target
        self.address = ""
        self.forth, self.back = Direction(), Direction()
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @classmethod
    async def open(cls, target: str) -> Self:
        """A way to `target`, which is `host:port`, or `unix://` and a path beside which this one listens."""
        way = cls(target)
        if path := _socket(target):
            near = path.removesuffix("redis.sock") + "way.sock"
            way._server = await asyncio.start_unix_server(way._serve, near)
            way.address = f"unix://{near}"
        else:
            way._server = await asyncio.start_server(way._serve, "127.0.0.1", 0)
            host, port = way._server.sockets[0].getsockname()
            way.address = f"{host}:{port}"
        return way

    def hold(self) -> None:
        """Silence in both directions; connections stay open, and new ones are silent too."""
        self.forth.hold()
        self.back.hold()

    def release(self) -> None:
        self.forth.release()
        self.back.release()

    def cut(self) -> None:
        """End all connections at once; what was on its way is lost."""
        for connection in self._connections:
            connection.cancel()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        connections = list(self._connections)
        self.cut()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.current_task()
        assert connection is not None
        self._connections.add(connection)
        try:
            await self._connect(reader, writer)
        except asyncio.CancelledError:
            pass  # cut: the task's end is asked for, and all that there is to it
        except OSError:
            pass  # one end is gone, or was never there: so is the way
        finally:
            self._connections.discard(connection)
            writer.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = _socket(self._target)
        if path:
            back, forth = await asyncio.open_unix_connection(path)
        else:
            host, _, port = self._target.rpartition(":")
            back, forth = await asyncio.open_connection(host, int(port))
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.forth.carry(reader, forth))
                group.create_task(self.back.carry(back, writer))
        except* OSError:
            pass  # one end is gone
        finally:
            forth.transport.abort()


def _socket(target: str) -> str:
    return target.removeprefix("unix://") if target.startswith("unix://") else ""
