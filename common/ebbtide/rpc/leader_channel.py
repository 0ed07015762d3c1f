"""Sends calls to the leading coordinator among those that one setting names (`host:port,host:port`).

The channel watches the health of all of them; the one that began to serve last leads. A switch therefore waits for no
timeout, and never comes before the store has given another coordinator the lease. Invariant: a call goes to the
coordinator that leads as far as is known when the call begins. When another begins to lead, the calls under way end as
`Unavailable`, even if the former leader is frozen. With one address it is a plain channel.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Iterator
from typing import Any, Final

import grpc
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from ebbtide.auth.security import ClientSecurity
from ebbtide.errors import InvalidRequest, Unavailable
from ebbtide.rpc.backoff import pauses
from ebbtide.rpc.channel import Channel, DelegatingChannel, check_address, open_channel
from ebbtide.rpc.status_table import translated

log = logging.getLogger(__name__)

#: Only coordinators serve this.
_SERVICE: Final = "ebbtide.v1.Runs"
#: gRPC's health protocol. The SDK installs without its package: wrapper messages have the same bytes.
_HEALTH: Final = "/grpc.health.v1.Health/"
_SERVING, _UNKNOWN = 1, 3
#: Timeout of the question whether a coordinator still leads, when another one says that it leads.
_ASK_S: Final = 1.0
#: Waiting callers come to a new leader spread over this time.
_SPREAD_S: Final = 0.2
#: Callers that failed within this time after a switch try the new leader without their full pause.
_FRESH_S: Final = 1.0


def addresses(text: str, *, field: str = "coordinator") -> tuple[str, ...]:
    """The addresses of a setting, in its order. Raises `InvalidRequest` naming `field` and the bad address."""
    found = tuple(part.strip() for part in text.split(","))
    if not all(found):
        raise InvalidRequest(f"{text!r} lacks an address beside a comma: give host:port,host:port", field=field)
    for number, address in enumerate(found):
        check_address(address, field=field)
        if address in found[:number]:
            raise InvalidRequest(f"{text!r} names {address} twice; name each coordinator once", field=field)
    return found


class _Coordinator:
    """One coordinator: its channel, whether it is known to serve, and the calls under way."""

    def __init__(self, address: str, channel: Channel) -> None:
        self.address, self.channel = address, channel
        self.serving = False
        self.calls: dict[Any, None] = {}  # oldest first


class LeaderChannel(DelegatingChannel):
    """`target` is the address to which calls go now."""

    def __init__(self, text: str, security: ClientSecurity, *, field: str = "coordinator") -> None:
        """Raises `InvalidRequest` for a bad or repeated address, a missing token, or no TLS off the loopback."""
        self._coordinators = [_Coordinator(one, open_channel(one, security)) for one in addresses(text, field=field)]
        self._leader = self._coordinators[0]
        self._news, self._moves, self._moved_at = asyncio.Event(), 0, float("-inf")
        self._watchers: list[asyncio.Task[None]] = []

    @property
    def target(self) -> str:
        return self._leader.address

    @property
    def serving(self) -> frozenset[str]:
        """The addresses of the coordinators that say they lead, by their last word."""
        return frozenset(one.address for one in self._coordinators if one.serving)

    @contextlib.contextmanager
    def translated(self, service: str = "coordinator") -> Iterator[None]:
        """Raise what the service raised instead of gRPC's errors, and `Unavailable` if the lead moved meanwhile."""
        one, moves = self._leader, self._moves
        try:
            with translated(service, one.address):
                yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if moves == self._moves or task is None or task.cancelling():
                raise
            now = "ceased to lead for a while" if one is self._leader else f"no longer leads; {self.target} does"
            raise Unavailable(f"{service} at {one.address} {now}") from None

    async def ask_health(self, timeout_s: float) -> None:
        """Return once the service has answered, whatever its health is. Raises gRPC's errors."""
        check: Any = self.unary_unary(f"{_HEALTH}Check", StringValue.SerializeToString, Int32Value.FromString)
        await check(StringValue(), timeout=timeout_s)

    async def pause(self, seconds: float) -> None:
        """Wait before a further try, for at most `seconds`: less if a coordinator begins to lead meanwhile."""
        if len(self._coordinators) == 1:
            await asyncio.sleep(seconds)
            return
        self._watch()
        if time.monotonic() - self._moved_at > _FRESH_S:
            news = self._news
            try:
                async with asyncio.timeout(seconds):
                    await news.wait()
            except TimeoutError:
                return
        await asyncio.sleep(random.uniform(0.0, _SPREAD_S))

    def _present(self) -> grpc.aio.Channel:
        return self._leader.channel

    def _call(self, kind: str, method: str, args: tuple[Any, ...], options: Any) -> Any:
        made = {one: getattr(one.channel, kind)(method, *args, **options) for one in self._coordinators}
        if len(self._coordinators) == 1:
            return made[self._leader]

        def begin(*request: Any, **more: Any) -> Any:
            self._watch()
            one = self._leader
            call = made[one](*request, **more)
            one.calls[call] = None
            call.add_done_callback(lambda done: one.calls.pop(done, None))
            return call

        return begin

    def _watch(self) -> None:
        """Begin to watch at the first call, because a loop runs then."""
        if not self._watchers:
            self._watchers = [asyncio.create_task(self._follow(one), name="coordinators") for one in self._coordinators]

    async def _follow(self, coordinator: _Coordinator) -> None:
        """Follow the health of one coordinator, for ever."""
        watch: Any = coordinator.channel.unary_stream(
            f"{_HEALTH}Watch", StringValue.SerializeToString, Int32Value.FromString
        )
        waits = pauses(0.1, 1.0)
        while True:
            call, first = watch(StringValue(value=_SERVICE)), True
            try:
                async for answer in call:
                    waits = pauses(0.1, 1.0)
                    served = coordinator.serving
                    await self._said(coordinator, answer.value, first=first)
                    if served and not coordinator.serving:
                        break  # it may be leaving: then it waits for its calls to end
                    first = False
            except grpc.aio.AioRpcError as error:
                log.debug("coordinator at %s: %s", coordinator.address, error.details())
            finally:
                call.cancel()
            self._serves(coordinator, serving=False)
            await asyncio.sleep(next(waits))

    async def _said(self, coordinator: _Coordinator, status: int, *, first: bool) -> None:
        if status == _UNKNOWN:
            log.warning("the service at %s is no coordinator; correct the addresses", coordinator.address)
        serving = status == _SERVING
        # It may have begun to lead before this first word from it; then the leader known here may be newer.
        if (
            serving
            and first
            and coordinator is not self._leader
            and self._leader.serving
            and await self._leads(self._leader)
        ):
            coordinator.serving = True
            return
        self._serves(coordinator, serving=serving)

    async def _leads(self, coordinator: _Coordinator) -> bool:
        check: Any = coordinator.channel.unary_unary(
            f"{_HEALTH}Check", StringValue.SerializeToString, Int32Value.FromString
        )
        try:
            return bool((await check(StringValue(value=_SERVICE), timeout=_ASK_S)).value == _SERVING)
        except grpc.aio.AioRpcError:
            return False

    def _serves(self, coordinator: _Coordinator, *, serving: bool) -> None:
        began, coordinator.serving = serving and not coordinator.serving, serving
        if began:
            self._go_to(coordinator)
        elif not self._leader.serving and (other := next((each for each in self._coordinators if each.serving), None)):
            self._go_to(other)

    def _go_to(self, coordinator: _Coordinator) -> None:
        """Send calls here from now on, and wake the callers that wait for a leader."""
        former, self._leader = self._leader, coordinator
        if former is not coordinator:
            log.info("the coordinator at %s leads", coordinator.address)
            self._moves, self._moved_at = self._moves + 1, time.monotonic()
            for call in list(former.calls):
                call.cancel()
        self._news.set()
        self._news = asyncio.Event()

    async def close(self, grace: float | None = None) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        for one in self._coordinators:
            await one.channel.close(grace)
