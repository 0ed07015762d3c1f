"""Relays TCP between two processes at a set rate and latency, counts the bytes, and can be cut and frozen.

Invariant: bytes leave in the order in which they came, `latency_s` after the rate let them pass; all connections share
one rate per direction. The link runs in the event loop that started it.
"""

import asyncio
import contextlib
from collections import deque
from typing import Final, Self

#: Much less than a connection has under way, so that connections share the rate evenly.
_CHUNK: Final = 1 << 15
#: Bytes read ahead of the rate, as into a router's queue; bytes that wait for the latency do not count.
_QUEUE: Final = 1 << 18
#: Shorter pauses are merged: timers are no finer.
_TICK_S: Final = 0.002


class ShapedLink:
    """Listens at `address` (loopback, a free port) and forwards to `target` (host:port) and back.

    `bytes_per_s` each way (0: as fast as it goes) and `latency_s` each way may be changed at any time. `sent` counts
    bytes towards the target, `received` those back, both as they leave the link.
    """

    def __init__(self, target: str, bytes_per_s: float = 0.0, latency_s: float = 0.0) -> None:
        self.target, self.bytes_per_s, self.latency_s = target, bytes_per_s, latency_s
        self.address = ""
        self._ways = (_Way(self), _Way(self))
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._cut = False

    @property
    def sent(self) -> int:
        return self._ways[0].bytes

    @property
    def received(self) -> int:
        return self._ways[1].bytes

    async def start(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=_CHUNK)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._drop()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def cut(self) -> None:
        """Break all connections, and each new one, until `mend`."""
        self._cut = True
        self._drop()

    def mend(self) -> None:
        self._cut = False

    def freeze(self) -> None:
        """Let nothing pass until `thaw`; connections stay open."""
        self._thawed.clear()

    def thaw(self) -> None:
        self._thawed.set()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with contextlib.suppress(OSError, asyncio.CancelledError):  # connections may break
                if not self._cut:
                    await self._join(reader, writer)
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self.target.rpartition(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port), limit=_CHUNK)
        there, back = self._ways
        try:
            async with asyncio.TaskGroup() as group:
                for way, source, sink in ((there, reader, far_writer), (back, far_reader, writer)):
                    queue = _Queue()
                    group.create_task(way.take(source, queue))
                    group.create_task(way.give(queue, sink, self._thawed))
        except* OSError:
            pass  # one side closed, so the other closes too
        finally:
            far_writer.transport.abort()

    def _drop(self) -> None:
        for task in self._connections:
            task.cancel()


class _Way:
    """Schedules the bytes of all connections in one direction."""

    def __init__(self, link: ShapedLink) -> None:
        self._link = link
        self._free_at = 0.0
        self.bytes = 0

    async def take(self, source: asyncio.StreamReader, queue: "_Queue") -> None:
        loop = asyncio.get_running_loop()
        while data := await source.read(_CHUNK):
            rate, now = self._link.bytes_per_s, loop.time()
            self._free_at = max(now, self._free_at) + (len(data) / rate if rate else 0.0)
            await queue.put(self._free_at + self._link.latency_s, data)
            if (pause := self._free_at - loop.time()) > _TICK_S:
                await asyncio.sleep(pause)
        await queue.put(0.0, b"")

    async def give(self, queue: "_Queue", sink: asyncio.StreamWriter, thawed: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        while True:
            leaves_at, data = await queue.get()
            if not data:
                break
            if (pause := leaves_at - loop.time()) > _TICK_S:
                await asyncio.sleep(pause)
            await thawed.wait()
            self.bytes += len(data)
            sink.write(data)
            await sink.drain()
        if sink.can_write_eof():
            sink.write_eof()


class _Queue:
    """Bytes under way. Bounded, except for those that wait for the latency."""

    def __init__(self) -> None:
        self._items: deque[tuple[float, bytes]] = deque()
        self._changed = asyncio.Condition()
        self._due = 0

    async def put(self, leaves_at: float, data: bytes) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._overdue() < _QUEUE)
            self._items.append((leaves_at, data))
            self._changed.notify_all()

    async def get(self) -> tuple[float, bytes]:
        async with self._changed:
            await self._changed.wait_for(lambda: self._items)
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def _overdue(self) -> int:
        """Bytes that may leave already, but wait because the other side reads slowly or the link is frozen."""
        now, size = asyncio.get_running_loop().time(), 0
        for leaves_at, data in self._items:
            if leaves_at > now:
                break
            size += len(data)
        return size
