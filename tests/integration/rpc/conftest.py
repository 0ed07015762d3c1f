"""A server on a free port whose servicers do as a test says, one method of each kind."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest

from ebbtide.auth.security import ClientSecurity, ServerSettings
from ebbtide.rpc.channel import open_channel, write
from ebbtide.rpc.server import Server
from ebbtide.v1 import fleet_pb2, fleet_pb2_grpc, runs_pb2, runs_pb2_grpc, weights_pb2, weights_pb2_grpc

TOKEN = "correct horse"
METHODS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class Probe(runs_pb2_grpc.RunsServicer, fleet_pb2_grpc.FleetServicer, weights_pb2_grpc.WeightsServicer):
    """`act` is awaited by every method before it answers; raising there is the method's failure."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.ended: list[str] = []
        self.act: Callable[[], Awaitable[None]] = self._nothing

    async def _nothing(self) -> None: ...

    async def GetRun(self, request: runs_pb2.GetRunRequest, context: Any) -> runs_pb2.Run:
        self.calls.append("unary_unary")
        try:
            await self.act()
            return runs_pb2.Run(run_id=request.run_id)
        finally:
            self.ended.append("unary_unary")

    async def WatchRun(self, request: Any, context: Any) -> AsyncIterator[runs_pb2.RunEvent]:
        self.calls.append("unary_stream")
        try:
            yield runs_pb2.RunEvent(kind="first")
            await self.act()
            while request.cursor == "endless":
                yield runs_pb2.RunEvent(kind="more")
            yield runs_pb2.RunEvent(kind="last")
        finally:
            self.ended.append("unary_stream")

    async def PutTiles(self, request_iterator: Any, context: Any) -> weights_pb2.PutTilesResponse:
        self.calls.append("stream_unary")
        await self.act()
        return weights_pb2.PutTilesResponse(stored=len([tile async for tile in request_iterator]))

    async def Append(self, request_iterator: Any, context: Any) -> AsyncIterator[fleet_pb2.AppendResponse]:
        self.calls.append("stream_stream")
        try:
            async for request in request_iterator:
                await self.act()
                yield fleet_pb2.AppendResponse(sequence=request.sequence)
        finally:
            self.ended.append("stream_stream")


async def call(channel: grpc.aio.Channel, method: str, *, tiles: int = 3, **options: Any) -> Any:
    """One whole call of the kind, and what it answered.

    Without tiles, the client-streaming call only waits for its status: a write under way when a call ends covers it.
    """
    if method == "unary_unary":
        runs: Any = runs_pb2_grpc.RunsStub(channel)
        return await runs.GetRun(runs_pb2.GetRunRequest(run_id="a"), **options)
    if method == "unary_stream":
        runs = runs_pb2_grpc.RunsStub(channel)
        return [event async for event in runs.WatchRun(runs_pb2.WatchRunRequest(), **options)]
    if method == "stream_unary":
        weights: Any = weights_pb2_grpc.WeightsStub(channel)
        upload = weights.PutTiles(**options)
        for _ in range(tiles):
            await write(upload, weights_pb2.Tile())
        if tiles:
            await upload.done_writing()
        return await upload
    fleet: Any = fleet_pb2_grpc.FleetStub(channel)
    stream, answers = fleet.Append(**options), []
    for sequence in range(3):
        await write(stream, fleet_pb2.AppendRequest(sequence=sequence))
        answers.append(await stream.read())
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF
    return answers


class Cluster:
    """Servers and channels that live as long as the test."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.probe = Probe()  # type: ignore[abstract] # gRPC answers UNIMPLEMENTED for the rest
        self.seen: list[tuple[str, str]] = []
        self.call = call

    async def serve(self, settings: ServerSettings | None = None, **options: Any) -> Server:
        server = Server(
            settings or ServerSettings(token=TOKEN),
            [
                (runs_pb2_grpc.add_RunsServicer_to_server, self.probe, "ebbtide.v1.Runs"),
                (fleet_pb2_grpc.add_FleetServicer_to_server, self.probe, "ebbtide.v1.Fleet"),
                (weights_pb2_grpc.add_WeightsServicer_to_server, self.probe, "ebbtide.v1.Weights"),
            ],
            observe=lambda method, code, seconds: self.seen.append((method.rpartition("/")[2], code)),
            **options,
        )
        await server.start()
        self._stack.push_async_callback(server.stop, 0)
        return server

    async def connect(self, target: str, security: ClientSecurity | None = None, **options: Any) -> grpc.aio.Channel:
        channel = open_channel(target, security or ClientSecurity(token=TOKEN), **options)
        return await self._stack.enter_async_context(channel)


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        yield Cluster(stack)
