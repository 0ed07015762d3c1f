"""Redis in place: fakeredis runs the real commands and Lua scripts behind a connection that carries RESP.

The data survives a kill as the append-only file would have it: all that was done (`always`), or all but a tail, by
replaying the commands before it. What was asked for when the kill came was done or was not.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable
from typing import Any, Final

import hiredis
from fakeredis import FakeServer
from fakeredis import _msgs as msgs
from fakeredis._commands import Key
from fakeredis._core import CommandItem
from fakeredis._helpers import SimpleError, SimpleString
from fakeredis._socket._fakesocket import FakeSocket
from fakeredis._socket._resp import convert_to_resp2
from fakeredis.commands_mixins.scripting_mixin import _convert_redis_arg as _argument
from redis.asyncio import Redis

from tests.simulation.loop import Proc, SimLoop, current
from tests.simulation.network import Network, Wire

PORT: Final = 6379
_READS: Final = frozenset({b"PING", b"GET", b"PTTL", b"INFO", b"CONFIG", b"ZRANGE", b"HGETALL", b"HELLO", b"CLIENT"})
_CONFIG: Final = {
    b"appendonly": b"yes",
    b"appendfsync": b"always",
    b"maxmemory": b"0",
    b"maxmemory-policy": b"noeviction",
}


#: Replies that are the same in RESP2.
_PLAIN: Final = frozenset({bytes, int, type(None)})


class Socket(FakeSocket):
    """fakeredis's commands without its sockets and its notifications, with scripts compiled once.

    `touched`: keys that commands were about, and fields of hashes that were written, until somebody clears it.
    """

    def __init__(self, server: FakeServer) -> None:
        super().__init__(server, 0, client_class=Redis)
        self._compiled: dict[bytes, Any] = {}
        self._found: dict[bytes, Any] = {}
        self._shapes: dict[tuple[str, int], list[tuple[int, Any, bool]]] = {}
        self._runs = 0
        self.reply: Any = None
        self.touched: set[bytes] = set()

    def put_response(self, msg: Any) -> None:
        self.reply = msg

    def _decode_error(self, error: SimpleError) -> Any:
        return error

    def _lua_redis_call(self, lua_runtime: Any, _expected_globals: Any, op: bytes, *args: Any) -> Any:
        """As fakeredis does it, without its look at all globals before every command."""
        if (found := self._found.get(op)) is None:
            name = op.decode().lower()
            if name == "xinfo":  # the one with a subcommand, which is part of its name
                found = self._name_to_func(f"{name} {args[0].decode().lower()}")
            else:
                found = self._found[op] = self._name_to_func(name)
        func, sig = found
        if sig.name[:5] == "xinfo":
            args = args[1:]
        result = self._run_command(func, sig, [arg if type(arg) is bytes else _argument(arg) for arg in args], True)
        return result if type(result) in {bytes, int} else self._convert_redis_result(lua_runtime, result)

    def _shape(self, sig: Any, size: int) -> list[tuple[int, Any, bool]]:
        """Which of a command's arguments are more than bytes: place, type, and whether it is a key."""
        found = self._shapes.get((sig.name, size))
        if found is None:
            sig.check_arity(range(size), self.version)
            repeats = [sig.repeat[at % len(sig.repeat)] for at in range(size - len(sig.fixed))]
            types = enumerate([*sig.fixed, *repeats])
            found = [(at, type_, isinstance(type_, Key)) for at, type_ in types if type_ is not bytes]
            self._shapes[sig.name, size] = found
        return found

    def _run_command(self, func: Any, sig: Any, args: list[Any], from_script: bool) -> Any:
        """As fakeredis does it, with its look at the signature done once."""
        if from_script and msgs.FLAG_NO_SCRIPT in sig.flags:
            return super()._run_command(func, sig, args, from_script)
        self._subkey_events = []
        if sig.name in {"hset", "hdel"}:
            self.touched.update(args[1:])
        db, items, bound = self._db, list[CommandItem](), list(args)
        result: Any
        try:
            shape = self._shape(sig, len(args))
            for at, type_, is_key in shape:
                if not is_key:
                    bound[at] = type_.decode(bound[at])
                elif type_.missing_return is not Key.UNSPECIFIED and bound[at] not in db:
                    return type_.missing_return
            for at, type_, is_key in shape:
                if is_key:
                    self.touched.add(bound[at])
                    bound[at] = self._item(db, sig, bound[at], type_.type_)
                    items.append(bound[at])
        except SimpleError as error:
            return error
        try:
            result = func(*bound)
            if type(result) not in _PLAIN and msgs.FLAG_SKIP_CONVERT_TO_RESP2 not in sig.flags:
                result = convert_to_resp2(result, self.server_type)
        except SimpleError as error:
            result = error
        for item in items:
            item.writeback(remove_empty_val=msgs.FLAG_LEAVE_EMPTY_VAL not in sig.flags)
        return result

    @staticmethod
    def _item(db: Any, sig: Any, key: bytes, type_: Any) -> CommandItem:
        item, default = db.get(key), None
        if type_ is not None:
            if item is not None and type(item.value) is not type_:
                raise SimpleError(msgs.WRONGTYPE_MSG)
            if item is None and type_ is not bytes and msgs.FLAG_DO_NOT_CREATE not in sig.flags:
                default = type_()
        return CommandItem(key, db, item, default=default)

    def eval(self, script: bytes, numkeys: int, *keys_and_args: bytes) -> Any:
        sha = hashlib.sha1(script, usedforsecurity=False).hexdigest().encode()
        self._server.script_cache[sha] = script
        runtime = self._get_server_runtime(self._server)
        held: Any = self._server
        if (chunk := self._compiled.get(sha)) is None:
            chunk = self._compiled[sha] = runtime.compile(script)
        held._lua_current_socket[0] = self
        self._script_resp = 2
        held._lua_set_keys_argv(
            runtime.table_from(keys_and_args[:numkeys]), runtime.table_from(keys_and_args[numkeys:])
        )
        self._runs += 1
        try:
            result = chunk()
        finally:
            self._script_resp = None
            if self._runs % 64 == 0:
                runtime.execute("collectgarbage()")
        return self._convert_lua_result(result, nested=False)


def encode(value: Any) -> bytes:
    """RESP2."""
    match value:
        case None:
            made = b"$-1\r\n"
        case bytes():
            made = b"$%d\r\n%b\r\n" % (len(value), value)
        case int():
            made = b":%d\r\n" % value
        case SimpleError():
            made = b"-%b\r\n" % value.value.encode()
        case SimpleString():
            made = b"+%b\r\n" % value.value
        case float():
            made = encode(repr(value).encode())
        case _:
            made = b"*%d\r\n%b" % (len(value), b"".join(map(encode, value)))
    return made


Seen = Callable[[list[bytes], Any], None]


class Server:
    """A redis-server. `before` is told of every command that comes, `seen` of it again with its reply."""

    def __init__(self, loop: SimLoop, network: Network, before: Callable[[list[bytes]], None], seen: Seen) -> None:
        self._loop, self._network, self._before, self._seen = loop, network, before, seen
        self.log: list[tuple[float, list[bytes]]] = []
        self.fake = FakeServer(version=(6, 2))
        self._socket = Socket(self.fake)
        self.proc = Proc("redis", loop)
        self._lives = 0

    def start(self, proc: Proc) -> None:
        """In a new process; scripts have to be loaded again."""
        self.proc = proc
        self._lives += 1
        self.fake.script_cache.clear()
        self._network.listen(PORT, proc, self._accept)

    def _accept(self, wire: Wire) -> None:
        wire.ends[1] = Connection(self, wire)

    def lose_tail(self, kept: int) -> None:
        """Forget all but the first `kept` commands, as a file that was not synced does."""
        log, self.log = self.log[:kept], []
        self.fake = FakeServer(version=(6, 2))
        self._socket = Socket(self.fake)
        clock, before = current.get(), current.get().clock
        for when, command in log:
            clock.clock = before + when - time.time()
            self.execute(command, replay=True)
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

    def execute(self, command: list[bytes], *, replay: bool = False) -> bytes:
        name = command[0].upper()
        if name == b"INFO":
            return encode(b"# Server\r\nredis_version:6.2.0\r\nrole:master\r\nrun_id:%d\r\n" % self._lives)
        if name == b"CONFIG":
            return encode(
                [part for key, value in _CONFIG.items() if key == command[2].lower() for part in (key, value)]
            )
        if name in (b"CLIENT", b"SELECT"):
            return b"+OK\r\n"
        if name not in _READS:
            self.log.append((time.time(), command))
        self._socket.reply = None
        if not replay:
            self._before(command)
        self._socket._process_command(command)
        reply = self._socket.reply
        if not replay:
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
