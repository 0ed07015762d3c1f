"""Channels that prove themselves on every call, by the token and the certificates that lie in their files then.

The token is added where a call is made, not by gRPC's interceptors: those pass each message of a stream through a
queue. gRPC's channels keep the certificates that they were made with, so a call behind a change of those is made on a
new one; calls under way stay on theirs, which is closed behind the last of them.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from weakref import WeakSet

import grpc

from ebbtide.auth.reloaded_files import ReloadedFiles
from ebbtide.auth.security import AUTHORIZATION, ClientSecurity
from ebbtide.errors import InvalidRequest
from ebbtide.rpc.channel_options import KEEPALIVE_S, client_options

#: Deadline of unary calls that name none.
DEFAULT_TIMEOUT_S: Final = 30.0


def open_channel(target: str, security: ClientSecurity, *, keepalive_s: float = KEEPALIVE_S) -> "Channel":
    """A channel to `target` (host:port or unix:path); connects with the first call, and again whenever it must.

    Raises `InvalidRequest` for a target that is no address, a missing token, or one off the loopback without TLS.
    """
    check_address(target, field="target")
    bearer, options = security.fresh_bearer(), client_options(keepalive_s)

    def connect(credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
        if credentials is None:
            return grpc.aio.insecure_channel(target, options=options)
        return grpc.aio.secure_channel(target, credentials, options=options)

    return Channel(connect, security.fresh_credentials(target), lambda: ((AUTHORIZATION, bearer.get()),))


def open_socket(path: Path, *, keepalive_s: float = KEEPALIVE_S) -> "Channel":
    """A channel to the unix socket at `path` in a private folder, whose server asks for no token."""

    def connect(_credentials: None) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(f"unix:{path.absolute()}", options=client_options(keepalive_s))

    return Channel(connect, ReloadedFiles((), lambda: None), lambda: ())


def check_address(address: str, *, field: str) -> str:
    """Return `address` if it is host:port or unix:path; raise `InvalidRequest` naming `field` otherwise."""
    if address.startswith("unix:"):
        return address
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535 or set("/,") & set(host):
        raise InvalidRequest(f"{address!r} is no address: give host:port or unix:path", field=field)
    return address


async def write(call: Any, message: Any) -> None:
    """`call.write(message)`, which for a stream that ended raises its status, an `AioRpcError`, and nothing else."""
    try:
        await call.write(message)
    except asyncio.InvalidStateError:
        raise grpc.aio.AioRpcError(
            await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
        ) from None


class _Call:
    """One method of a channel. Adds the channel's metadata, and a deadline where none was named."""

    def __init__(self, channel: "Channel", make: Callable[[grpc.aio.Channel], Any], timeout: float | None) -> None:
        self._channel, self._make, self._timeout = channel, make, timeout
        self._inner: grpc.aio.Channel | None = None
        self._call: Any = None  # gRPC's, of `_inner`

    def __call__(self, *request: Any, timeout: float | None = None, metadata: Any = None, **options: Any) -> Any:
        inner = self._channel.current()
        if inner is not self._inner:
            self._inner, self._call = inner, self._make(inner)
        call = self._call(
            *request,
            timeout=self._timeout if timeout is None else timeout,
            metadata=(*self._channel.metadata(), *(metadata or ())),
            **options,
        )
        self._channel.began(call)
        return call


class Outer(grpc.aio.Channel):
    """A channel whose calls are made on other channels, as `_call` says for a method of each kind."""

    def _call(self, kind: str, method: str, args: tuple[Any, ...], options: Any) -> Any:
        raise NotImplementedError

    def unary_unary(self, method: str, *args: Any, **options: Any) -> Any:
        return self._call("unary_unary", method, args, options)

    def unary_stream(self, method: str, *args: Any, **options: Any) -> Any:
        return self._call("unary_stream", method, args, options)

    def stream_unary(self, method: str, *args: Any, **options: Any) -> Any:
        return self._call("stream_unary", method, args, options)

    def stream_stream(self, method: str, *args: Any, **options: Any) -> Any:
        return self._call("stream_stream", method, args, options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


class Channel(Outer):
    """gRPC channels, one after another, whose every call bears `metadata()` and, if unary, a deadline.

    Invariant: new calls are made on `_inner`, which has the `_credentials` of the moment. `_former` has those before it
    on which calls are under way; they are closed behind the last.
    """

    def __init__(
        self,
        connect: Callable[[Any], grpc.aio.Channel],
        credentials: ReloadedFiles[Any],
        metadata: Callable[[], tuple[tuple[str, str], ...]],
    ) -> None:
        self._connect, self._fresh, self.metadata = connect, credentials, metadata
        self._credentials = credentials.get()
        self._inner = connect(self._credentials)
        self._calls: WeakSet[Any] = WeakSet()
        self._former: list[tuple[grpc.aio.Channel, WeakSet[Any]]] = []
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def former(self) -> int:
        """How many connections with former certificates still serve calls."""
        return len(self._former)

    def current(self) -> grpc.aio.Channel:
        """gRPC's channel for a new call."""
        credentials = self._fresh.get()
        if credentials is not self._credentials:
            self._former.append((self._inner, self._calls))
            self._credentials, self._inner, self._calls = credentials, self._connect(credentials), WeakSet()
            self._prune()
        return self._inner

    def began(self, call: Any) -> None:
        """A call was made on `_inner`."""
        if self._credentials is not None:
            self._calls.add(call)
            call.add_done_callback(self._prune)

    def _prune(self, _done: Any = None) -> None:
        over = [pair for pair in self._former if all(call.done() for call in pair[1])]
        for pair in over:
            self._former.remove(pair)
            task = asyncio.ensure_future(pair[0].close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _call(self, kind: str, method: str, args: tuple[Any, ...], options: Any) -> Any:
        timeout = DEFAULT_TIMEOUT_S if kind == "unary_unary" else None
        return _Call(self, lambda inner: getattr(inner, kind)(method, *args, **options), timeout)

    async def close(self, grace: float | None = None) -> None:
        last = self._credentials
        self._fresh = ReloadedFiles((), lambda: last)  # no further channel from here on
        for inner in (self._inner, *(inner for inner, _ in self._former)):
            await inner.close(grace)
        await asyncio.gather(*self._closing)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._inner.channel_ready()
