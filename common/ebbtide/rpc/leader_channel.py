"""The coordinators that one setting names, `host:port,host:port`: a channel whose calls go to the one that leads.

All of them are asked to tell whenever they begin or cease to serve; the one that began last is it. So a switch waits
for no timeout, and never comes before the store has given another the lease. Invariant: a call goes to the coordinator
that leads as far as is known when it is made; those that are under way when another is found to lead end as
`Unavailable`, also where the former is frozen and would never answer. With one address it is a channel as any other.
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
from ebbtide.rpc.channel import Channel, Outer, check_address, open_channel
from ebbtide.rpc.status_table import translated

log = logging.getLogger(__name__)

#: What only a coordinator serves.
_SERVICE: Final = "ebbtide.v1.Runs"
#: gRPC's health protocol, whose two messages have the bytes of these wrappers: the SDK installs without the package.
_HEALTH: Final = "/grpc.health.v1.Health/"
_SERVING, _UNKNOWN = 1, 3
#: One that says it leads is asked for so long, where another says so too.
_ASK_S: Final = 1.0
#: All who wait for a leader come back within this time, and not at once.
_SPREAD_S: Final = 0.2
#: Who failed at the former leader just now need not wait long before it tries the new one.
_FRESH_S: Final = 1.0


def addresses(text: str, *, field: str = "coordinator") -> tuple[str, ...]:
    """The addresses that a setting names, in its order. Raises `InvalidRequest` naming `field`, and the bad one."""
    found = tuple(part.strip() for part in text.split(","))
    if not all(found):
        raise InvalidRequest(f"{text!r} lacks an address beside a comma: give host:port,host:port", field=field)
    for number, address in enumerate(found):
        check_address(address, field=field)
        if address in found[:number]:
            raise InvalidRequest(f"{text!r} names {address} twice; name each coordinator once", field=field)
    return found


class _Coordinator:
    """One coordinator: its channel, whether it serves as far as is known, and the calls under way."""

    def __init__(self, address: str, channel: Channel) -> None:
        self.address, self.channel = address, channel
        self.serving = False
        self.calls: dict[Any, None] = {}  # in the order of their beginnings


class LeaderChannel(Outer):
    """`target` is the address that calls go to now."""

    def __init__(self, text: str, security: ClientSecurity, *, field: str = "coordinator") -> None:
        """Raises `InvalidRequest` for a bad or doubled address, a missing token, or no TLS off the loopback."""
        self._heads = [_Coordinator(one, open_channel(one, security)) for one in addresses(text, field=field)]
        self._head = self._heads[0]
        self._news, self._moved_at = asyncio.Event(), float("-inf")
        self._watchers: list[asyncio.Task[None]] = []

    @property
    def target(self) -> str:
        return self._head.address

    @property
    def serving(self) -> frozenset[str]:
        """The addresses that say they lead, as far as was heard."""
        return frozenset(head.address for head in self._heads if head.serving)

    @contextlib.contextmanager
    def translated(self, service: str = "coordinator") -> Iterator[None]:
        """Raise what the service raised in place of gRPC's errors, and `Unavailable` where another leads by now."""
        head = self._head
        try:
            with translated(service, head.address):
                yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if head is self._head or task is None or task.cancelling():
                raise
            raise Unavailable(f"{service} at {head.address} leads no more; {self._head.address} does") from None

    async def pause(self, seconds: float) -> None:
        """Wait before a further try, so long at most: less where a coordinator begins to lead meanwhile."""
        if len(self._heads) == 1:
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

    # -- calls ---------------------------------------------------------------------------------------------------

    def _call(self, kind: str, method: str, args: tuple[Any, ...], options: Any) -> Any:
        made = {head: getattr(head.channel, kind)(method, *args, **options) for head in self._heads}
        if len(self._heads) == 1:
            return made[self._head]

        def begin(*request: Any, **more: Any) -> Any:
            self._watch()
            head = self._head
            call = made[head](*request, **more)
            head.calls[call] = None
            call.add_done_callback(lambda done: head.calls.pop(done, None))
            return call

        return begin

    # -- who leads -----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """From the first call on, which is made where a loop runs."""
        if not self._watchers:
            self._watchers = [asyncio.create_task(self._follow(head), name="heads") for head in self._heads]

    async def _follow(self, head: _Coordinator) -> None:
        """Hear from one coordinator for ever whether it serves."""
        watch: Any = head.channel.unary_stream(f"{_HEALTH}Watch", StringValue.SerializeToString, Int32Value.FromString)
        waits = pauses(0.1, 1.0)
        while True:
            call, first = watch(StringValue(value=_SERVICE)), True
            try:
                async for answer in call:
                    waits = pauses(0.1, 1.0)
                    served = head.serving
                    await self._said(head, answer.value, first=first)
                    if served and not head.serving:
                        break  # it may be leaving, and waits for its calls to end
                    first = False
            except grpc.aio.AioRpcError as error:
                log.debug("coordinator at %s: %s", head.address, error.details())
            finally:
                call.cancel()
            self._serves(head, serving=False)
            await asyncio.sleep(next(waits))

    async def _said(self, head: _Coordinator, status: int, *, first: bool) -> None:
        if status == _UNKNOWN:
            log.warning("at %s is a service that is no coordinator; correct the addresses", head.address)
        serving = status == _SERVING
        # It begins to lead now, or did so before it was heard: then the one that leads here may be newer.
        if serving and first and head is not self._head and self._head.serving and await self._leads(self._head):
            head.serving = True
            return
        self._serves(head, serving=serving)

    async def _leads(self, head: _Coordinator) -> bool:
        check: Any = head.channel.unary_unary(f"{_HEALTH}Check", StringValue.SerializeToString, Int32Value.FromString)
        try:
            return bool((await check(StringValue(value=_SERVICE), timeout=_ASK_S)).value == _SERVING)
        except grpc.aio.AioRpcError:
            return False

    def _serves(self, head: _Coordinator, *, serving: bool) -> None:
        began, head.serving = serving and not head.serving, serving
        if began:
            self._go_to(head)
        elif not self._head.serving and (other := next((one for one in self._heads if one.serving), None)):
            self._go_to(other)

    def _go_to(self, head: _Coordinator) -> None:
        """Calls go here from now on, and those who wait for a leader come."""
        former, self._head = self._head, head
        if former is not head:
            log.info("the coordinator at %s leads", head.address)
            self._moved_at = time.monotonic()
            for call in list(former.calls):
                call.cancel()
        self._news.set()
        self._news = asyncio.Event()

    # -- the channel's own ---------------------------------------------------------------------------------------

    async def close(self, grace: float | None = None) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        for head in self._heads:
            await head.channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._head.channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._head.channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._head.channel.channel_ready()
