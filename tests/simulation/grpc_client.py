"""Channels and calls in place of gRPC's: the same semantics towards our code, over a `Wire`.

Messages travel as bytes. What can be seen of gRPC's own behaviour: a call on a channel that cannot connect fails as
UNAVAILABLE, at once while the channel backs off; a broken connection ends all its calls as UNAVAILABLE, and what had
come and was not read may be lost with it; a call that is cancelled here raises `CancelledError` to its readers; a write
to an ended call raises `InvalidStateError`.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Final

import grpc
from grpc.aio import AioRpcError, Metadata

from tests.simulation.loop import Proc, current
from tests.simulation.network import Network, Wire

#: How long an attempt to connect to a host that does not answer lasts (`rpc.options`), and the pauses between attempts.
_CONNECT_S: Final = 1.0
_BACKOFF_S: Final = (0.1, 0.2, 0.4, 0.8, 1.6, 2.0)


def encoded(message: Any) -> bytes:
    """The message's bytes, in which maps are in order."""
    data: bytes = message.SerializeToString(deterministic=True)
    return data


class Call:
    """One call, whatever its kind."""

    def __init__(self, channel: "SimChannel", method: str, decode: Any) -> None:
        self._channel, self.method, self._decode = channel, method, decode
        self._loop = channel.network.loop
        self._inbox: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._outgoing: list[tuple[Any, ...]] | None = []  # until the channel is connected
        self._code: grpc.StatusCode | None = None
        self._details, self._trailing = "", Metadata()
        self._closed = self._gone = False
        self._deadline: asyncio.TimerHandle | None = None
        self._callbacks: list[Callable[[Any], None]] = []
        self.number = 0

    def begin(self, timeout: float | None, metadata: Any, request: Any = None, *, whole: bool = False) -> "Call":
        if timeout is not None:
            self._deadline = self._loop.call_later(timeout, self._expired)
        self.send(("open", self.method, tuple(metadata or ())))
        if whole:
            self.send(("message", encoded(request)))
            self.send(("half",))
            self._closed = True
        self._channel.begin(self)
        return self

    def send(self, frame: tuple[Any, ...]) -> None:
        if self._outgoing is not None:
            self._outgoing.append(frame)
        else:
            self._channel.send(self.number, frame)

    def connected(self) -> None:
        frames, self._outgoing = self._outgoing or [], None
        for frame in frames:
            self._channel.send(self.number, frame)
        self._changed.set()

    # -- what comes in -------------------------------------------------------------------------------------------

    def arrived(self, frame: tuple[Any, ...]) -> None:
        if self._code is not None:
            return
        if frame[0] == "message":
            self._inbox.append(frame[1])
        else:
            self.end(frame[1], frame[2], frame[3])
        self._changed.set()

    def end(self, code: grpc.StatusCode, details: str, trailing: tuple[tuple[str, str], ...] = ()) -> None:
        if self._code is not None:
            return
        self._code, self._details, self._trailing = code, details, Metadata(*trailing)
        if self._deadline is not None:
            self._deadline.cancel()
        self._channel.forget(self)
        self._changed.set()
        for callback in self._callbacks:
            callback(self)

    def broken(self, reason: str) -> None:
        if self._loop.random.random() < 0.5:
            self._inbox.clear()
        self.end(grpc.StatusCode.UNAVAILABLE, reason)

    def _expired(self) -> None:
        if self._code is None:
            self.send(("cancel",))
            self.end(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    # -- what our code sees --------------------------------------------------------------------------------------

    def cancel(self) -> bool:
        if self._code is not None:
            return False
        self.send(("cancel",))
        self._gone = True
        self.end(grpc.StatusCode.CANCELLED, "Locally cancelled by application!")
        return True

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    def cancelled(self) -> bool:
        return self._gone

    def done(self) -> bool:
        return self._code is not None

    async def code(self) -> grpc.StatusCode:
        while self._code is None:
            await self._news()
        return self._code

    async def details(self) -> str:
        await self.code()
        return self._details

    async def initial_metadata(self) -> Metadata:
        return Metadata()

    async def trailing_metadata(self) -> Metadata:
        await self.code()
        return self._trailing

    async def write(self, message: Any) -> None:
        if self._code is not None:
            raise asyncio.InvalidStateError("RPC already finished.")
        if self._closed:
            raise asyncio.InvalidStateError('RPC is half closed after calling "done_writing".')
        while self._outgoing is not None and not self.done():
            await self._news()
        self._raise_for_status()
        self.send(("message", encoded(message)))
        await asyncio.sleep(0)

    async def done_writing(self) -> None:
        if self._code is None and not self._closed:
            self._closed = True
            self.send(("half",))

    def __aiter__(self) -> "Call":
        return self

    async def __anext__(self) -> Any:
        while not self._inbox:
            if self._code is not None:
                self._raise_for_status()
                raise StopAsyncIteration
            await self._news()
        return self._decode(self._inbox.popleft())

    def __await__(self) -> Generator[Any, None, Any]:
        return self._result().__await__()

    async def _result(self) -> Any:
        while self._code is None:
            await self._news()
        self._raise_for_status()
        return self._decode(self._inbox.popleft())

    async def _news(self) -> None:
        self._changed.clear()
        try:
            await self._changed.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise

    def _raise_for_status(self) -> None:
        if self._gone:
            raise asyncio.CancelledError
        if self._code is not None and self._code is not grpc.StatusCode.OK:
            raise AioRpcError(self._code, Metadata(), self._trailing, self._details)


class SimChannel:
    """One connection to `target`, made when it is wanted; belongs to the process that opened it."""

    def __init__(self, network: Network, target: str) -> None:
        self.network, self.target = network, target
        self._proc: Proc = current.get()
        self._port = int(target.rpartition(":")[2])
        self._wire: Wire | None = None
        self._connecting = False
        self._failures, self._backoff_until = 0, 0.0
        self._calls: dict[int, Call] = {}
        self._waiting: list[Call] = []
        self._numbers = 0
        self._ready = asyncio.Event()

    def _multi(self, method: str, decode: Any, *, whole: bool) -> Any:
        def call(request: Any = None, *, timeout: float | None = None, metadata: Any = None) -> Call:
            return Call(self, method, decode).begin(timeout, metadata, request, whole=whole)

        return call

    def unary_unary(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        return self._multi(method, response_deserializer, whole=True)

    def unary_stream(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        return self._multi(method, response_deserializer, whole=True)

    def stream_unary(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        return self._multi(method, response_deserializer, whole=False)

    def stream_stream(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        return self._multi(method, response_deserializer, whole=False)

    async def close(self, _grace: float | None = None) -> None:
        for call in [*self._calls.values(), *self._waiting]:
            call.cancel()
        if self._wire is not None:
            self._wire.close(0)
            self._wire = None

    async def channel_ready(self) -> None:
        await self._ready.wait()

    # -- calls ---------------------------------------------------------------------------------------------------

    def begin(self, call: Call) -> None:
        self._numbers += 1
        call.number = self._numbers
        if self._wire is not None:
            self._calls[call.number] = call
            call.connected()
        elif not self._connecting and self.network.loop.now < self._backoff_until:
            self._proc.after(0.0, call.end, grpc.StatusCode.UNAVAILABLE, "failed to connect: backing off")
        else:
            self._waiting.append(call)
            self._connect()

    def forget(self, call: Call) -> None:
        self._calls.pop(call.number, None)
        if call in self._waiting:
            self._waiting.remove(call)

    def send(self, number: int, frame: tuple[Any, ...]) -> None:
        if self._wire is not None:
            self.network.note(self._wire, 0, self._calls[number].method, number, frame)
            self._wire.send(0, (number, *frame))

    def arrived(self, frame: tuple[Any, ...]) -> None:
        number, *rest = frame
        if (call := self._calls.get(number)) is not None:
            call.arrived(tuple(rest))

    def broken(self, reason: str) -> None:
        self._wire = None
        self._ready.clear()
        for call in list(self._calls.values()):
            call.broken(reason)

    # -- connecting ----------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        if self._connecting:
            return
        self._connecting = True
        loop = self.network.loop
        trip = loop.random.uniform(0.0005, 0.003)
        found = self.network.listeners.get(self._port)
        answers = self.network.reachable(self._proc, self._port) and not (found and found[0].stopped)
        self._proc.after(trip if answers else _CONNECT_S, self._tried, answers)

    def _tried(self, answers: bool) -> None:
        self._connecting = False
        wire = self.network.connect(self._proc, self._port, keepalive=True) if answers else None
        if wire is None:
            pause = _BACKOFF_S[min(self._failures, len(_BACKOFF_S) - 1)]
            self._failures += 1
            self._backoff_until = self.network.loop.now + pause * self.network.loop.random.uniform(0.8, 1.2)
            for call in list(self._waiting):
                call.end(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses")
            return
        wire.ends[0] = self
        self._wire, self._failures = wire, 0
        self._ready.set()
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            self._calls[call.number] = call
            call.connected()
