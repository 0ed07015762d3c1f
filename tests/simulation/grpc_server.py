"""A server in place of gRPC's, under the real interceptors and servicers. A call's task is cancelled when its client
goes away, and its request stream ends then."""

import asyncio
import inspect
from collections import deque
from typing import Any

import grpc
from grpc.aio import AbortError

from tests.simulation.grpc_client import encoded
from tests.simulation.loop import Proc, current
from tests.simulation.network import Network, Wire


class Details:
    """What interceptors are told of a call."""

    def __init__(self, method: str, metadata: tuple[tuple[str, str], ...]) -> None:
        self.method, self.invocation_metadata = method, metadata


class ServerCall:
    """One call as the server has it: the servicer's context, and its request iterator."""

    def __init__(self, side: "ServerEnd", number: int, method: str, metadata: tuple[tuple[str, str], ...]) -> None:
        self._side, self._number = side, number
        self.method, self._metadata = method, metadata
        self._inbox: deque[bytes] = deque()
        self._news = asyncio.Event()
        self._half = self._over = False
        self._code: grpc.StatusCode | None = None
        self.decode: Any = None
        self.task: asyncio.Task[None] | None = None

    def arrived(self, frame: tuple[Any, ...]) -> None:
        kind = frame[0]
        if kind == "message":
            self._inbox.append(frame[1])
        elif kind == "half":
            self._half = True
        else:
            self.client_left()
        self._news.set()

    def client_left(self) -> None:
        self._half = self._over = True
        self._inbox.clear()
        self._news.set()
        if self.task is not None:
            self.task.cancel()

    # -- the request iterator ------------------------------------------------------------------------------------

    def __aiter__(self) -> "ServerCall":
        return self

    async def __anext__(self) -> Any:
        while not self._inbox:
            if self._half:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self.decode(self._inbox.popleft())

    # -- the context ---------------------------------------------------------------------------------------------

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    def peer(self) -> str:
        return f"sim:{self._side.wire.procs[0]}"

    def code(self) -> grpc.StatusCode | None:
        return self._code

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        self.finish(code, details, tuple(trailing_metadata))
        raise AbortError("Locally aborted.")

    async def write(self, message: Any) -> None:
        self.send(encoded(message))

    def send(self, data: bytes) -> None:
        if not self._over:
            self._side.send(self._number, ("message", data))

    def finish(self, code: grpc.StatusCode, details: str = "", trailing: tuple[tuple[str, str], ...] = ()) -> None:
        if not self._over:
            self._over, self._code = True, code
            self._side.send(self._number, ("status", code, details, trailing))
        self._side.calls.pop(self._number, None)


class ServerEnd:
    """The server's end of one connection."""

    def __init__(self, server: "SimServer", wire: Wire) -> None:
        self._server, self.wire = server, wire
        self.calls: dict[int, ServerCall] = {}

    def send(self, number: int, frame: tuple[Any, ...]) -> None:
        network = self._server.network
        network.note(self.wire, 1, self.calls[number].method, number, frame)
        self.wire.send(1, (number, *frame))

    def arrived(self, frame: tuple[Any, ...]) -> None:
        number, *rest = frame
        if rest[0] == "open":
            call = self.calls[number] = ServerCall(self, number, rest[1], rest[2])
            self._server.begin(call)
        elif (found := self.calls.get(number)) is not None:
            found.arrived(tuple(rest))

    def broken(self, _reason: str) -> None:
        self._server.connections.pop(self, None)
        for call in list(self.calls.values()):
            call.client_left()


class SimServer:
    """In place of `grpc.aio.server(...)`."""

    def __init__(self, network: Network, interceptors: Any) -> None:
        self.network, self._interceptors = network, list(interceptors or ())
        self._proc: Proc = current.get()
        self._handlers: dict[str, Any] = {}
        self._port, self._stopping = 0, False
        self.connections: dict[ServerEnd, None] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}

    def add_generic_rpc_handlers(self, _handlers: Any) -> None:
        """The registered ones say all."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self._handlers |= {f"/{service}/{name}": handler for name, handler in handlers.items()}

    def add_insecure_port(self, address: str) -> int:
        self._port = int(address.rpartition(":")[2])
        return self._port

    async def start(self) -> None:
        self.network.listen(self._port, self._proc, self._accept)

    async def stop(self, grace: float | None) -> None:
        self._stopping = True
        if self.network.listeners.get(self._port, (None,))[0] is self._proc:
            del self.network.listeners[self._port]
        if self._tasks and grace:
            await asyncio.wait(list(self._tasks), timeout=grace)
        for task in list(self._tasks):
            task.cancel()
        for side in list(self.connections):
            side.wire.close(1, "the server is gone")

    def _accept(self, wire: Wire) -> None:
        side = ServerEnd(self, wire)
        wire.ends[1] = side
        self.connections[side] = None

    def begin(self, call: ServerCall) -> None:
        if self._stopping:
            call.finish(grpc.StatusCode.UNAVAILABLE, "the server is stopping")
            return
        call.task = self._proc.spawn(self._serve(call), call.method)
        self._tasks[call.task] = None
        call.task.add_done_callback(lambda task: self._tasks.pop(task, None))

    async def _serve(self, call: ServerCall) -> None:
        async def found(details: Any) -> Any:
            return self._handlers.get(details.method)

        continuation: Any = found
        for interceptor in reversed(self._interceptors):
            continuation = _chained(interceptor, continuation)
        handler = await continuation(Details(call.method, call.invocation_metadata()))
        if handler is None:
            call.finish(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
            return
        call.decode = handler.request_deserializer or bytes  # as gRPC has it
        try:
            await self._run(handler, call)
        except AbortError:
            return
        except Exception as error:
            call.finish(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}")
            raise

    async def _run(self, handler: Any, call: ServerCall) -> None:
        streams = handler.request_streaming
        behaviour = (
            (handler.stream_stream if handler.response_streaming else handler.stream_unary)
            if streams
            else (handler.unary_stream if handler.response_streaming else handler.unary_unary)
        )
        request = call if streams else await anext(aiter(call), None)
        if request is None:
            return  # the client left before it had asked
        answer = behaviour(request, call)
        if inspect.isasyncgen(answer):
            async for response in answer:
                call.send(encoded(response))
        else:
            found = await answer
            if not handler.response_streaming:
                call.send(encoded(found))
        call.finish(grpc.StatusCode.OK)


def _chained(interceptor: Any, continuation: Any) -> Any:
    async def call(details: Any) -> Any:
        return await interceptor.intercept_service(continuation, details)

    return call
