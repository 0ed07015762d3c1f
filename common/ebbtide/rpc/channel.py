"""Channels that prove themselves on every call.

The token is added where a call is made, not by gRPC's interceptors: those pass each message of a stream through a
queue.
"""

import asyncio
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import grpc

from ebbtide.errors import InvalidRequest
from ebbtide.rpc.options import KEEPALIVE_S, client_options
from ebbtide.rpc.security import AUTHORIZATION, ClientSecurity

#: Deadline of unary calls that name none.
DEFAULT_TIMEOUT_S: Final = 30.0


def open_channel(target: str, security: ClientSecurity, *, keepalive_s: float = KEEPALIVE_S) -> "Channel":
    """A channel to `target` (host:port or unix:path); connects with the first call, and again whenever it must.

    Raises `InvalidRequest` for a target that is no address, a missing token, or one off the loopback without TLS.
    """
    check_address(target, field="target")
    metadata = ((AUTHORIZATION, security.bearer()),)
    credentials, options = security.credentials(target), client_options(keepalive_s)
    if credentials is None:
        return Channel(grpc.aio.insecure_channel(target, options=options), metadata)
    return Channel(grpc.aio.secure_channel(target, credentials, options=options), metadata)


def open_socket(path: Path, *, keepalive_s: float = KEEPALIVE_S) -> "Channel":
    """A channel to the unix socket at `path` in a private folder, whose server asks for no token."""
    return Channel(grpc.aio.insecure_channel(f"unix:{path.absolute()}", options=client_options(keepalive_s)), ())


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

    def __init__(self, inner: Any, metadata: tuple[tuple[str, str], ...], timeout: float | None) -> None:
        self._inner, self._metadata, self._timeout = inner, metadata, timeout

    def __call__(self, *request: Any, timeout: float | None = None, metadata: Any = None, **options: Any) -> Any:
        return self._inner(
            *request,
            timeout=self._timeout if timeout is None else timeout,
            metadata=(*self._metadata, *(metadata or ())),
            **options,
        )


class Channel(grpc.aio.Channel):
    """A gRPC channel whose every call bears `metadata` and, if unary, a deadline."""

    def __init__(self, inner: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...]) -> None:
        self._inner, self._metadata = inner, metadata

    def _call(self, kind: str, method: str, args: tuple[Any, ...], options: Any, timeout: float | None = None) -> Any:
        return _Call(getattr(self._inner, kind)(method, *args, **options), self._metadata, timeout)

    def unary_unary(self, method: str, *args: Any, **options: Any) -> Any:
        return self._call("unary_unary", method, args, options, DEFAULT_TIMEOUT_S)

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

    async def close(self, grace: float | None = None) -> None:
        await self._inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._inner.channel_ready()
