"""Redis in place: fakeredis runs the real commands and Lua scripts behind a connection that carries RESP.

The data survives a kill as the append-only file would have it: all that was done (`always`), or all but a tail, by
replaying the commands before it. What was asked for when the kill came was done or was not.
"""

import asyncio
import time
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any, Final

import hiredis
from fakeredis import FakeServer

from tests.simulation.commands import Socket, encode
from tests.simulation.loop import Proc, SimLoop, current
from tests.simulation.network import Network, Wire

PORT: Final = 6379
_READS: Final = frozenset(
    {b"PING", b"GET", b"PTTL", b"INFO", b"CONFIG", b"ZRANGE", b"HGETALL", b"HMGET", b"HELLO", b"CLIENT"}
)
_CONFIG: Final = {
    b"appendonly": b"yes",
    b"appendfsync": b"always",
    b"maxmemory": b"0",
    b"maxmemory-policy": b"noeviction",
}

Seen = Callable[[list[bytes], Any], None]


class Server:
    """A redis-server. `before` is told of every command that comes, `seen` of it again with its reply."""

    def __init__(self, loop: SimLoop, network: Network, before: Callable[[list[bytes]], None], seen: Seen) -> None:
        self._loop, self._network, self._before, self._seen = loop, network, before, seen
        self.log: list[tuple[float, float, list[bytes]]] = []  # when, when by its clock, what
        self.fake = FakeServer(version=(6, 2))
        self._socket = Socket(self.fake)
        self.proc = Proc("redis", loop)
        self._lives = 0
        self.client: Proc | None = None  # who asks for the command that is being done
        self.config = dict(_CONFIG)

    def start(self, proc: Proc) -> None:
        """In a new process; scripts have to be loaded again."""
        self.proc = proc
        self._lives += 1
        self.fake.script_cache.clear()
        self._network.listen(PORT, proc, self._accept)

    def _accept(self, wire: Wire) -> None:
        wire.ends[1] = Connection(self, wire)

    def lose_tail(self, since: float) -> None:
        """Forget what was done after `since`, as a file that was not synced does."""
        log, self.log = [entry for entry in self.log if entry[0] <= since], []
        self.close()
        self.fake = FakeServer(version=(6, 2))
        self._socket = Socket(self.fake)
        clock, before = current.get(), current.get().clock
        for when, wall, command in log:
            clock.clock += wall - time.time()
            self._socket._process_command(command)
            self.log.append((when, wall, command))
        clock.clock = before

    def close(self) -> None:
        """Let Lua's memory go: it refers back to the server, out of the garbage collector's sight."""
        vars(self.fake).clear()
        self._socket._compiled.clear()

    @property
    def touched(self) -> set[bytes]:
        """What commands were about since this was cleared."""
        return self._socket.touched

    @property
    def data(self) -> dict[bytes, Any]:
        """Key -> item, as fakeredis keeps them."""
        found: dict[bytes, Any] = self.fake.dbs[0]._dict
        return found

    def execute(self, command: list[bytes]) -> bytes:
        name = command[0].upper()
        if name == b"INFO":
            said = b"# Server\r\nredis_version:6.2.0\r\nrole:master\r\nrun_id:%d\r\nserver_time_usec:%d\r\n"
            return encode(said % (self._lives, time.time() * 1e6))
        if name == b"CONFIG":
            asked = command[2].lower()
            return encode([part for pair in self.config.items() if fnmatchcase(pair[0], asked) for part in pair])
        if name in (b"CLIENT", b"SELECT"):
            return b"+OK\r\n"
        self._socket.reply = None
        self._before(command)
        self._socket._process_command(command)
        reply = self._socket.reply
        if name not in _READS and not str(getattr(reply, "value", "")).startswith("NOSCRIPT"):
            self.log.append((self._loop.now, time.time(), command))
        self._seen(command, reply)
        return encode(reply)


class Connection:
    """The server's end of one connection: commands in, replies out, in their order."""

    def __init__(self, server: Server, wire: Wire) -> None:
        self._server, self._wire = server, wire
        self._reader = hiredis.Reader()

    def arrived(self, frame: tuple[Any, ...]) -> None:
        self._reader.feed(frame[1])
        replies = []
        self._server.client = self._wire.procs[0]
        while (command := self._reader.gets()) is not False:
            replies.append(self._server.execute(command))
        self._wire.send(1, ("data", b"".join(replies)))

    def broken(self, _reason: str) -> None:
        pass


class Transport(asyncio.Transport):
    """A client's end of a connection that carries bytes."""

    def __init__(self, loop: SimLoop, protocol: asyncio.Protocol, wire: Wire) -> None:
        super().__init__()
        self._loop, self._protocol, self._wire = loop, protocol, wire
        self._closing = False
        wire.ends[0] = self
        protocol.connection_made(self)

    def arrived(self, frame: tuple[Any, ...]) -> None:
        if not self._closing:
            self._protocol.data_received(frame[1])

    def broken(self, reason: str) -> None:
        self._lost(ConnectionResetError(reason))

    def _lost(self, error: Exception | None) -> None:
        if not self._closing:
            self._closing = True
            self._loop.call_soon(self._protocol.connection_lost, error)

    def write(self, data: Any) -> None:
        if not self._closing:
            self._wire.send(0, ("data", bytes(data)))

    def close(self) -> None:
        self._wire.close(0)
        self._lost(None)

    def abort(self) -> None:
        self.close()

    def is_closing(self) -> bool:
        return self._closing

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        assert isinstance(protocol, asyncio.Protocol)
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def pause_reading(self) -> None:
        """All that comes is small."""

    def resume_reading(self) -> None:
        """See above."""


async def connect(
    loop: SimLoop, network: Network, factory: Callable[[], asyncio.Protocol], port: int
) -> tuple[asyncio.Transport, asyncio.Protocol]:
    """As `create_connection` does: refused where nobody listens, and for ever where nothing answers."""
    client = current.get()
    await asyncio.sleep(loop.random.uniform(0.0002, 0.002))
    while not network.reachable(client, port):  # noqa: ASYNC110 - the packet is sent again and again
        await asyncio.sleep(0.2)
    wire = network.connect(client, port, keepalive=False)
    if wire is None:
        raise ConnectionRefusedError(111, "Connection refused")
    protocol = factory()
    return Transport(loop, protocol, wire), protocol
