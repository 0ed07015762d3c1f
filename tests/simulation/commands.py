"""fakeredis's commands and Lua scripts, without its sockets, and faster."""

import hashlib
from typing import Any, Final

from fakeredis import FakeServer
from fakeredis import _msgs as msgs
from fakeredis._commands import Key
from fakeredis._core import CommandItem
from fakeredis._helpers import SimpleError, SimpleString
from fakeredis._socket._fakesocket import FakeSocket
from fakeredis._socket._resp import convert_to_resp2
from fakeredis.commands_mixins.scripting_mixin import _convert_redis_arg as _argument
from redis.asyncio import Redis

#: Replies that are the same in RESP2.
_PLAIN: Final = frozenset({bytes, int, type(None)})


class Socket(FakeSocket):
    """fakeredis's commands without its sockets and its notifications, with scripts compiled once.

    `touched`: keys that commands were about, and fields of hashes that were written, until somebody clears it.
    """

    def __init__(self, server: FakeServer) -> None:
        super().__init__(server, 0, client_class=Redis)
        self._compiled: dict[bytes, Any] = {}
        self._shas: dict[bytes, bytes] = {}
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
        bound, items = list(args), list[CommandItem]()
        try:
            shape = self._shape(sig, len(args))
            for at, type_, is_key in shape:
                if not is_key:
                    bound[at] = type_.decode(bound[at])
                elif type_.missing_return is not Key.UNSPECIFIED and bound[at] not in self._db:
                    return type_.missing_return
            self._look_up(sig, shape, bound, items)
        except SimpleError as error:
            return error
        return self._called(func, sig, bound, items)

    def _called(self, func: Any, sig: Any, bound: list[Any], items: list[CommandItem]) -> Any:
        result: Any
        try:
            result = func(*bound)
            if type(result) not in _PLAIN and msgs.FLAG_SKIP_CONVERT_TO_RESP2 not in sig.flags:
                result = convert_to_resp2(result, self.server_type)
        except SimpleError as error:
            result = error
        for item in items:
            item.writeback(remove_empty_val=msgs.FLAG_LEAVE_EMPTY_VAL not in sig.flags)
        return result

    def _look_up(
        self, sig: Any, shape: list[tuple[int, Any, bool]], bound: list[Any], items: list[CommandItem]
    ) -> None:
        """Put what the store has in the place of its keys."""
        for at, marker, is_key in shape:
            if is_key:
                key, type_, default = bound[at], marker.type_, None
                item = self._db.get(key)
                if type_ is not None and item is not None and type(item.value) is not type_:
                    raise SimpleError(msgs.WRONGTYPE_MSG)
                if item is None and type_ not in {None, bytes} and msgs.FLAG_DO_NOT_CREATE not in sig.flags:
                    default = type_()
                bound[at] = CommandItem(key, self._db, item, default=default)
                items.append(bound[at])
                self.touched.add(key)

    def eval(self, script: bytes, numkeys: int, *keys_and_args: bytes) -> Any:
        if (sha := self._shas.get(script)) is None:
            sha = self._shas[script] = hashlib.sha1(script, usedforsecurity=False).hexdigest().encode()
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
