"""Opens channels whose every call carries the present token and certificates of their files.

The token is added where a call begins, not by gRPC's interceptors: those pass each message of a stream through a
queue. A gRPC channel keeps its first certificates. After they change, new calls begin on a new channel; calls under way
stay on the former one, which closes after its last call.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Self
from weakref import WeakSet

import grpc

from ebbtide.auth.reloaded_files import ReloadedFiles
from ebbtide.auth.security import AUTHORIZATION, ClientSecurity
from ebbtide.errors import InvalidRequest
from ebbtide.rpc.channel_options import KEEPALIVE_S, client_options

#: Deadline of unary calls that name none.
DEFAULT_TIMEOUT_S: Final = 30.0
#: Deadline of calls that are answered once their writes are durable: for a store that syncs late this takes 30 s.
DURABLE_TIMEOUT_S: Final = 50.0


def open_channel(target: str, security: ClientSecurity, *, keepalive_s: float = KEEPALIVE_S) -> "Channel":
    """A channel to `target` (host:port or unix:path); connects at the first call, and again when the connection breaks.

    Raises `InvalidRequest` for a bad address, a missing token, or an address off the loopback without TLS.
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
    """Return `address` if it is host:port or unix:path; otherwise raise `InvalidRequest` naming `field`."""
    if address.startswith("unix:"):
        return address
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535 or set("/,") & set(host):
        raise InvalidRequest(f"{address!r} is no address: give host:port or unix:path", field=field)
    return address


async def write(call: Any, message: Any) -> None:
    """`call.write(message)`. If the stream has ended, raises its status, an `AioRpcError`."""
    try:
        await call.write(message)
    except asyncio.InvalidStateError:
        raise await _status(call) from None


async def write_first(call: Any, message: Any) -> None:
    """`write`, for a stream's first message. gRPC waits for ever with that one if the call ends before its metadata was
    sent. Raises `CancelledError` if the call was cancelled.
    """
    over = asyncio.Event()
    call.add_done_callback(lambda _: over.set())
    writing, ending = asyncio.create_task(write(call, message)), asyncio.create_task(over.wait())
    try:
        await asyncio.wait((writing, ending), return_when=asyncio.FIRST_COMPLETED)
        if writing.done():
            return writing.result()
    finally:
        ending.cancel()
        if not writing.cancel() and not writing.cancelled():
            writing.exception()  # a caller that is cancelled does not ask for it
    if call.cancelled():
        raise asyncio.CancelledError
    raise await _status(call)


async def _status(call: Any) -> grpc.aio.AioRpcError:
    """The status of a call that has ended, as an error."""
    return grpc.aio.AioRpcError(
        await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
    )


class _Call:
    """One method of a channel. Adds the channel's metadata, and a default deadline."""

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
    """A channel that makes its calls on other channels: `_call` begins them, `_present` is the one in use."""

    def _call(self, kind: str, method: str, args: tuple[Any, ...], options: Any) -> Any:
        raise NotImplementedError

    def _present(self) -> grpc.aio.Channel:
        raise NotImplementedError

    def unary_unary(self, method: str, *args: Any, **options: Any) -> Any:
        return self._call("unary_unary", method, args, options)

    def unary_stream(self, method: str, *args: Any, **options: Any) -> Any:
        return self._call("unary_stream", method, args, options)

    def stream_unary(self, method: str, *args: Any, **options: Any) -> Any:
        return self._call("stream_unary", method, args, options)

    def stream_stream(self, method: str, *args: Any, **options: Any) -> Any:
        return self._call("stream_stream", method, args, options)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._present().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._present().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._present().channel_ready()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Channel(Outer):
    """A series of gRPC channels. Every call carries `metadata()` and, if unary, a deadline.

    Invariant: new calls begin on `_inner`, which has the present `_credentials`. `_former` has the earlier channels
    that still serve calls; each closes after its last call.
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
        """The number of connections with former certificates that still serve calls."""
        return len(self._former)

    def current(self) -> grpc.aio.Channel:
        """The gRPC channel for a new call."""
        credentials = self._fresh.get()
        if credentials is not self._credentials:
            self._former.append((self._inner, self._calls))
            self._credentials, self._inner, self._calls = credentials, self._connect(credentials), WeakSet()
            self._prune()
        return self._inner

    def began(self, call: Any) -> None:
        """Note a call that began on `_inner`."""
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

    def _present(self) -> grpc.aio.Channel:
        return self._inner

    def _call(self, kind: str, method: str, args: tuple[Any, ...], options: Any) -> Any:
        timeout = DEFAULT_TIMEOUT_S if kind == "unary_unary" else None
        return _Call(self, lambda inner: getattr(inner, kind)(method, *args, **options), timeout)

    async def close(self, grace: float | None = None) -> None:
        last = self._credentials
        self._fresh = ReloadedFiles((), lambda: last)  # no new channel from now on
        for inner in (self._inner, *(inner for inner, _ in self._former)):
            await inner.close(grace)
        await asyncio.gather(*self._closing)
