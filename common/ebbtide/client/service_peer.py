"""Repeats the SDK's calls to one service, and resumes its streams, while the service is away.

All calls that the SDK makes are idempotent. An error that outlasts the patience names the service, its address and a
remedy.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol, TypeVar

import grpc

from ebbtide.auth.security import ClientSecurity
from ebbtide.errors import EbbtideError, StoreUnavailable, Unavailable
from ebbtide.rpc.backoff import pauses, retrying
from ebbtide.rpc.channel import DEFAULT_TIMEOUT_S
from ebbtide.rpc.leader_channel import LeaderChannel

T = TypeVar("T")
Request_contra = TypeVar("Request_contra", contravariant=True)
Response_co = TypeVar("Response_co", covariant=True)

#: A stream that was connected for so long was served: a service refuses sooner,
_SERVED_S: Final = 5.0
#: except when its store is away, for which it may wait.
_STORE_AWAY_S: Final = 30.0


class Unary(Protocol[Request_contra, Response_co]):
    def __call__(self, request: Request_contra, /, *, timeout: float | None = None) -> Awaitable[Response_co]: ...


class ServicePeer:
    """A service by name and address (of coordinators several, with commas between them). The first call connects."""

    def __init__(self, service: str, target: str, security: ClientSecurity, patience_s: float) -> None:
        self.service, self.patience_s = service, patience_s
        self.security = security
        self.channel = LeaderChannel(target, security, field=service)

    @property
    def target(self) -> str:
        """The address in use."""
        return self.channel.target

    async def close(self) -> None:
        await self.channel.close()

    def translated(self) -> AbstractContextManager[None]:
        """Turn gRPC's errors inside the block into Ebbtide's."""
        return self.channel.translated(self.service)

    async def reach(self, within_s: float) -> None:
        """Connect, and wait for any answer. Raises `Unavailable` without one in `within_s` seconds."""
        end = time.monotonic() + within_s

        async def once() -> None:
            with self.translated():
                await self.channel.ask_health(max(0.1, end - time.monotonic()))

        try:
            await retrying(once, patience_s=within_s, pause=self.channel.pause)
        except Unavailable:
            raise
        except EbbtideError:
            pass  # it answers; the calls that follow say what is wrong

    async def call(
        self,
        method: Unary[Request_contra, Response_co],
        request: Request_contra,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Response_co:
        """Call until the service answers, for up to `patience_s`; then raise the last error."""
        return await self.attempt(lambda: method(request, timeout=timeout_s))

    async def attempt(
        self, work: Callable[[], Awaitable[T]], *, on: tuple[type[EbbtideError], ...] = (Unavailable,)
    ) -> T:
        """Like `call`, for several calls that are repeated as a whole, and on other errors."""

        async def once() -> T:
            with self.translated():
                return await work()

        return await retrying(once, patience_s=self.patience_s, on=on, pause=self.channel.pause)

    async def follow(self, resume: Callable[[], "grpc.aio.UnaryStreamCall[Any, T]"]) -> AsyncGenerator[T, None]:
        """Yield the messages of a stream until the service ends it; `resume` opens it after the last message seen.

        Raises the service's error after `patience_s` without it, and any error except `Unavailable` at once. Patience
        begins again whenever the service came back, though it sent no message.
        """
        give_up: float | None = None
        waits = pauses()
        while True:
            stream = resume()
            connecting = asyncio.create_task(self._connected_at())
            try:
                with self.translated():
                    async for message in stream:
                        give_up, waits = None, pauses()
                        yield message
                    return
            except Unavailable as error:
                now, wait = time.monotonic(), next(waits)
                served_s = _STORE_AWAY_S if isinstance(error, StoreUnavailable) else _SERVED_S
                connected = connecting.done() and connecting.exception() is None
                if give_up is None or (connected and now - connecting.result() >= served_s):
                    give_up, waits = now + self.patience_s, pauses()
                if now + wait > give_up:
                    raise
            finally:
                connecting.cancel()
                stream.cancel()
            await self.channel.pause(wait)

    async def _connected_at(self) -> float:
        """Wait until the service is connected. Returns that time (seconds, monotonic)."""
        await self.channel.channel_ready()
        return time.monotonic()
