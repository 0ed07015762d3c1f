"""Dials the store (the server that a URL names, or the primary that Sentinels name) and learns its incarnation."""

import asyncio
from typing import Any, Final, Protocol, cast
from urllib.parse import parse_qs, quote, unquote, urlsplit

import hiredis
import redis.exceptions
from redis.asyncio import ConnectionPool
from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from ebbtide.errors import InvalidRequest

#: A server that takes longer before the first command is frozen or cut off.
_CONNECT_S: Final = 5.0
#: A server that takes longer to give its incarnation is frozen or gone.
_GREETING_S: Final = 5.0
#: A Sentinel that takes longer is skipped: another one, or the next try, has the answer.
_SENTINEL_S: Final = 1.0
_COMMON: Final[dict[str, Any]] = {"protocol": 2, "socket_timeout": None, "socket_connect_timeout": 5}
_SENTINEL_PORT: Final = 26379

Address = tuple[str, int]


class Dialer(Protocol):
    """Dials one store."""

    where: str  # names the store in messages, without passwords
    sentinel: bool

    async def dial(self) -> AbstractConnection:
        """A connected link to the store. Raises redis' errors, `OSError` and `TimeoutError`."""

    async def moved(self) -> bool:
        """Whether another server than the last one dialled is known to be the primary."""

    async def close(self) -> None: ...


def dialer(url: str) -> Dialer:
    """The dialer for `redis://`, `rediss://`, `unix://`, or `redis+sentinel://HOST:PORT,HOST:PORT/SERVICE[/DB]`
    (`rediss+...` with TLS). Raises `InvalidRequest` for anything else.
    """
    scheme = url.partition("://")[0]
    if scheme in {"redis+sentinel", "rediss+sentinel"}:
        return Sentinels(url)
    return Direct(url)


class Direct:
    sentinel = False

    def __init__(self, url: str) -> None:
        self.where = _public(url)
        try:
            self._pool = ConnectionPool.from_url(url, **_COMMON, retry=_once())
        except ValueError as error:
            why = "write a `?` or `@` in it as %3F or %40" if self.where.endswith("...") else str(error)
            raise _unusable(self.where, why) from None

    async def dial(self) -> AbstractConnection:
        return await _connected(self._pool.make_connection())  # type: ignore[no-untyped-call]

    async def moved(self) -> bool:
        return False

    async def close(self) -> None:
        """Nothing is kept."""


class Sentinels:
    """Dials the primary that Sentinels name. User and password before the `@` are the server's; the query's
    `sentinel_username` and `sentinel_password` are the Sentinels'.
    """

    sentinel = True

    def __init__(self, url: str) -> None:
        self.where = _public(url)
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise _unusable(self.where, str(error)) from None
        login, _, hosts = parts.netloc.rpartition("@")
        self._service, _, db = parts.path.strip("/").partition("/")
        asked = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        if not self._service or not hosts or (db and not db.isdecimal()):
            raise _unusable(self.where, "it must be redis+sentinel://HOST:PORT,HOST:PORT/SERVICE[/DB]")
        tls = parts.scheme.startswith("rediss")
        self._kind = SSLConnection if tls else Connection
        user, _, password = login.partition(":")
        self._login: dict[str, Any] = {
            "username": unquote(user) or None,
            "password": unquote(password) or None,
            "db": int(db or 0),
        }
        options = {name: asked.pop(f"sentinel_{name}", None) for name in ("username", "password")}
        if asked:
            raise _unusable(self.where, f"unknown options {', '.join(sorted(asked))}")
        wait = {"socket_timeout": _SENTINEL_S, "socket_connect_timeout": _SENTINEL_S, "retry": _once()}
        addresses = [self._address(host) for host in hosts.split(",")]
        self._sentinels = Sentinel(addresses, sentinel_kwargs={**options, **wait, "ssl": tls})  # type: ignore[no-untyped-call]
        self._dialled: Address | None = None

    def _address(self, text: str) -> Address:
        host, _, port = text.rpartition(":") if ":" in text else (text, "", str(_SENTINEL_PORT))
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise _unusable(self.where, f"{text!r} is no HOST:PORT")
        return host.strip("[]"), int(port)

    async def dial(self) -> AbstractConnection:
        named = await self._named()
        if named is None:
            raise redis.exceptions.ConnectionError(f"no Sentinel names a primary of {self._service} that is up")
        address, sound = named
        if not sound:
            raise redis.exceptions.ConnectionError(f"the primary of {self._service} is down and not yet replaced")
        link = self._kind(host=address[0], port=address[1], **self._login, **_COMMON, retry=_once())
        await _connected(link)
        self._dialled = address
        return link

    async def moved(self) -> bool:
        named = await self._named()
        return named is not None and named[0] != self._dialled

    async def close(self) -> None:
        await self._sentinels.aclose()

    async def _named(self) -> tuple[Address, bool] | None:
        """The primary of the newest configuration of all Sentinels, and whether it is up; None if none answers.

        All are asked, because one that was cut off may still name the former primary.
        """
        asked = [one.sentinel_masters() for one in self._sentinels.sentinels]
        found: list[tuple[int, Address, bool]] = []
        for states in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(states, redis.exceptions.RedisError | OSError | TimeoutError):
                continue
            if isinstance(states, BaseException):
                raise states
            if (state := cast("dict[str, dict[str, Any]]", states).get(self._service)) is not None:
                sound = self._sentinels.check_master_state(state, self._service)
                found.append((int(state["config-epoch"]), (state["ip"], int(state["port"])), sound))
        if not found:
            return None
        _, address, sound = max(found)
        return address, sound


async def _connected(link: AbstractConnection) -> AbstractConnection:
    """Connect the link. Its own timeouts do not cover the first reads, and a half-open connection never answers."""
    try:
        async with asyncio.timeout(_CONNECT_S):
            await link.connect()  # type: ignore[no-untyped-call]
    except BaseException as error:
        await link.disconnect(nowait=True)
        if type(error) is TimeoutError:
            raise TimeoutError(f"silent for {_CONNECT_S:g} s") from None
        raise
    return link


async def greet(link: AbstractConnection) -> str:
    """Ask a dialled server for the store's incarnation, which names its process and the history of its data.

    A restart or the promotion of a replica makes a new incarnation; a broken link does not. (A primary's first replica
    makes one, too, though nothing is lost: this costs some repeats.) Raises redis' errors for a server that is loading
    or a replica; `TimeoutError`.
    """
    async with asyncio.timeout(_GREETING_S):
        await link.send_command("INFO")
        said = info(await link.read_response())
    if said.get("loading", "0") != "0":
        raise redis.exceptions.BusyLoadingError("loading the dataset")
    if said.get("role", "master") != "master":
        raise redis.exceptions.ReadOnlyError("its role is that of a replica")
    return f"{said.get('run_id', '')}.{said.get('master_replid', '')}"


def info(text: bytes) -> dict[str, str]:
    """The values of `INFO`, by name."""
    lines = (line.partition(":") for line in text.decode().splitlines() if ":" in line)
    return {name: value for name, _, value in lines}


def _once() -> Retry:
    """No retries: the caller dials again."""
    return Retry(NoBackoff(), 0)


def with_password(url: str, password: str, *, field: str) -> str:
    """Put a password into a store's URL. Raises `InvalidRequest` naming `field` if it is empty, or the URL has one."""
    scheme, separator, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    login, _, hosts = authority.rpartition("@")
    user, colon, _ = login.partition(":")
    if not password:
        raise InvalidRequest("the file is empty; put the store's password into it", field=field)
    if colon:
        raise InvalidRequest("store_url has a password already; leave one out", field=field)
    return f"{scheme}{separator}{user}:{quote(password, safe='')}@{hosts}{slash}{path}"


def _public(url: str) -> str:
    """The URL without user, password and options. Only the scheme if an `@` follows a `?`: they may belong to an
    unescaped password.
    """
    head, _, options = url.partition("?")
    if "@" in options:
        scheme, found, _ = url.partition("://")
        return f"{scheme}://..." if found else "..."
    return head.rpartition("@")[2]


def _unusable(where: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{where!r} cannot be used: {why}", field="store_url")


class ReplyChunks:
    """The replies to commands that are sent from now on, chunk by chunk: all that came together are there at once.

    Nothing else may read from the link. redis-py's reader goes through several coroutines for each reply, and most of
    the coordinator's calls are small.
    """

    def __init__(self, link: AbstractConnection) -> None:
        connected: Any = link  # redis-py hands both parts to its own parsers alone
        self._stream = connected._reader  # noqa: SLF001
        self._parser = hiredis.Reader(
            protocolError=redis.exceptions.InvalidResponse,
            replyError=connected._parser.parse_error,  # noqa: SLF001
        )

    async def next(self) -> list[Any]:
        """The replies that came together, perhaps none; errors among them as exceptions. Raises `ConnectionError` of
        redis once the server closed the link.
        """
        data = await self._stream.read(1 << 16)
        if not data:
            raise redis.exceptions.ConnectionError("the store closed the connection")
        self._parser.feed(data)
        replies: list[Any] = []
        while (reply := self._parser.gets()) is not False:
            replies.append(reply)
        return replies
