"""Opens channels whose every call carries the present token and certificates of their files.

The token is added where a call begins, not by gRPC's interceptors: those pass each message of a stream through a
queue. A gRPC channel keeps its first certificates. After they change, new calls begin on a new channel; calls under way
stay on the former one, which closes after its last call.

A server takes a bounded number of calls of one connection. What is beyond it waits inside gRPC, unary calls too, while
their deadlines run. So a connection gets no more than `STREAMS` streams, and further ones get connections of their own.

gRPC silently ignores unknown options, of channels and of servers alike, so tests check their effect.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Self
from weakref import WeakKeyDictionary, WeakSet

import grpc

from ebbtide.auth.credential_files import ReloadedFiles
from ebbtide.auth.security import AUTHORIZATION, ClientSecurity
from ebbtide.errors import InvalidRequest, Unavailable
from ebbtide.rpc.status_table import translated

Options = list[tuple[str, int]]

#: Size of one message, both ways. Larger data (weights, big batches) travels in several messages.
MAX_MESSAGE_BYTES: Final = 4 << 20
#: A client pings this often, also while idle, and gives up after the timeout: it notices a frozen or unplugged peer
#: within 15 s.
KEEPALIVE_S: Final = 10.0
KEEPALIVE_TIMEOUT_S: Final = 5.0
#: Calls that a server has not begun yet, of all connections.
MAX_PENDING: Final = 1 << 16


def client_options(keepalive_s: float = KEEPALIVE_S) -> Options:
    return [
        *_common(keepalive_s),
        # Reconnect soon after a service's restart, even after a long absence.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.enable_retries", 0),  # callers retry: only they know which calls are safe to repeat
        ("grpc.use_local_subchannel_pool", 1),  # channels do not share connections
    ]


def server_options(keepalive_s: float = KEEPALIVE_S, *, max_streams: int = 1024, window_bytes: int = 0) -> Options:
    """`window_bytes`: bytes that a client may have under way per stream; 0: gRPC finds the number by pings, which costs
    a server of many small messages a tenth of its time.
    """
    fixed = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", window_bytes)] if window_bytes else []
    return [
        *_common(keepalive_s),
        *fixed,
        # Without this, a server answers clients' pings with too_many_pings.
        ("grpc.http2.min_ping_interval_without_data_ms", round(keepalive_s * 500)),
        ("grpc.max_concurrent_streams", max_streams),
        # Of calls that arrive faster than the server begins them, gRPC cancels some beyond 1,000.
        ("grpc.server.max_pending_requests", MAX_PENDING),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING),
        ("grpc.so_reuseport", 0),  # else two servers could silently share one port
    ]


def _common(keepalive_s: float) -> Options:
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", round(keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(KEEPALIVE_TIMEOUT_S * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


#: Deadline of unary calls that name none.
DEFAULT_TIMEOUT_S: Final = 30.0
#: Deadline of calls that are answered once their writes are durable: for a store that syncs late this takes 30 s.
DURABLE_TIMEOUT_S: Final = 50.0
#: Streams of one connection: a quarter of the calls that a server takes by default.
STREAMS: Final = 256


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


class _Connection:
    """One gRPC channel, and what is under way on it."""

    def __init__(self, inner: grpc.aio.Channel) -> None:
        self.inner = inner
        self.calls: WeakSet[Any] = WeakSet()  # all, if its credentials may change
        self.streams = 0


class _Call:
    """One method of a channel. Adds the channel's metadata, and a default deadline."""

    def __init__(
        self, channel: "Channel", make: Callable[[grpc.aio.Channel], Any], timeout: float | None, *, streams: bool
    ) -> None:
        self._channel, self._make, self._timeout, self._streams = channel, make, timeout, streams
        self._made: WeakKeyDictionary[_Connection, Any] = WeakKeyDictionary()  # gRPC's method on each

    def __call__(self, *request: Any, timeout: float | None = None, metadata: Any = None, **options: Any) -> Any:
        connection = self._channel.current(streams=self._streams)
        if (method := self._made.get(connection)) is None:
            method = self._made[connection] = self._make(connection.inner)
        call = method(
            *request,
            timeout=self._timeout if timeout is None else timeout,
            metadata=(*self._channel.metadata(), *(metadata or ())),
            **options,
        )
        self._channel.began(connection, call, streams=self._streams)
        return call


class DelegatingChannel(grpc.aio.Channel):
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


class Channel(DelegatingChannel):
    """A series of gRPC channels. Every call carries `metadata()` and, if unary, a deadline.

    Invariant: new calls begin on `_connections`, which have the present `_credentials`: unary calls on the first. A
    further one closes after its last stream. `_former` has the earlier ones that still serve calls; each closes after
    its last call.
    """

    def __init__(
        self,
        connect: Callable[[Any], grpc.aio.Channel],
        credentials: ReloadedFiles[Any],
        metadata: Callable[[], tuple[tuple[str, str], ...]],
    ) -> None:
        self._connect, self._fresh, self.metadata = connect, credentials, metadata
        self._credentials = credentials.get()
        self._connections = [_Connection(connect(self._credentials))]
        self._former: list[_Connection] = []
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def former(self) -> int:
        """The number of connections with former certificates that still serve calls."""
        return len(self._former)

    @property
    def connections(self) -> int:
        """The number of those on which new calls may begin."""
        return len(self._connections)

    def current(self, *, streams: bool) -> _Connection:
        """The connection for a new call, or for a stream."""
        credentials = self._fresh.get()
        if credentials is not self._credentials:
            self._former += self._connections
            self._credentials, self._connections = credentials, [_Connection(self._connect(credentials))]
            self._prune()
        if not streams:
            return self._connections[0]
        roomy = next((one for one in self._connections if one.streams < STREAMS), None)
        if roomy is None:
            roomy = _Connection(self._connect(self._credentials))
            self._connections.append(roomy)
        return roomy

    def began(self, connection: _Connection, call: Any, *, streams: bool) -> None:
        """Note a call that began on a connection."""
        if streams:
            connection.streams += 1
            call.add_done_callback(lambda _: self._streamed(connection))
        if self._credentials is not None:
            connection.calls.add(call)
            call.add_done_callback(self._prune)

    def _streamed(self, connection: _Connection) -> None:
        connection.streams -= 1
        if not connection.streams and connection in self._connections[1:]:
            self._connections.remove(connection)
            self._close(connection)

    def _prune(self, _done: Any = None) -> None:
        for one in [one for one in self._former if all(call.done() for call in one.calls)]:
            self._former.remove(one)
            self._close(one)

    def _close(self, connection: _Connection) -> None:
        task = asyncio.ensure_future(connection.inner.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _present(self) -> grpc.aio.Channel:
        return self._connections[0].inner

    def _call(self, kind: str, method: str, args: tuple[Any, ...], options: Any) -> Any:
        unary = kind == "unary_unary"
        timeout = DEFAULT_TIMEOUT_S if unary else None
        return _Call(self, lambda inner: getattr(inner, kind)(method, *args, **options), timeout, streams=not unary)

    async def close(self, grace: float | None = None) -> None:
        last = self._credentials
        self._fresh = ReloadedFiles((), lambda: last)  # no new channel from now on
        for one in (*self._connections, *self._former):
            await one.inner.close(grace)
        await asyncio.gather(*self._closing)


async def check_serving(address: str, security: ClientSecurity, *, timeout_s: float) -> None:
    """Return if the server at `address` says SERVING within `timeout_s`. Otherwise raise `Unavailable`, or
    `Unauthenticated` for an unknown token.
    """
    from grpc_health.v1 import health_pb2, health_pb2_grpc  # the SDK installs without it

    async with open_channel(address, security) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        with translated("server", address):
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        name = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        raise Unavailable(f"the server at {address} answers but does not serve: {name}")
