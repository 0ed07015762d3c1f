"""A coordinator that does as it is told, on a real socket: it refuses, restarts, and hands a lease to another."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from ebbtide.auth.security import ServerSettings
from ebbtide.errors import Draining, LeaseSuperseded, NotReady
from ebbtide.rpc.server import Server
from ebbtide.types.run import EnvironmentSpec, RunSpec
from ebbtide.v1 import fleet_pb2_grpc, rollouts_pb2, rollouts_pb2_grpc, runs_pb2, runs_pb2_grpc, types_pb2
from ebbtide.wire import to_proto

TOKEN = "a-token-of-tests"


SPEC = RunSpec(name="spell", model="model", environment=EnvironmentSpec(name="spell_backward"))


class Script(rollouts_pb2_grpc.RolloutsServicer, runs_pb2_grpc.RunsServicer, fleet_pb2_grpc.FleetServicer):
    """Keeps what it was asked; `errors` are raised, first to last, by the next calls of that name."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.errors: dict[str, list[Exception]] = {}
        self.fence = "fence-0"
        self.free = True
        self.ttl_s = 0.3
        self.store_life, self.durable_after_s = "first", 0.0
        self.finished = 0  # rollouts f1, f2, ... that have finished
        self.grown = asyncio.Event()
        self.version = 0
        self.seed = b""  # of the run's publisher
        self.slow_s = 0.0  # that a submit takes

    def calls(self, name: str) -> list[Any]:
        return [request for called, request in self.asked if called == name]

    def finish(self, count: int) -> None:
        self.finished = count
        self.grown.set()
        self.grown = asyncio.Event()

    def _take(self, name: str, request: Any) -> None:
        self.asked.append((name, type(request).FromString(request.SerializeToString())))
        if self.errors.get(name):
            raise self.errors[name].pop(0)

    def _fenced(self, name: str, request: Any, lease: Any) -> None:
        self._take(name, request)
        if lease.fence != self.fence:
            raise LeaseSuperseded("the lease was claimed by another holder; step down")

    def _run(self) -> runs_pb2.Run:
        return runs_pb2.Run(run_id="run", spec=to_proto(SPEC, types_pb2.RunSpec), status=types_pb2.RUN_STATUS_RUNNING)

    def _lease(self) -> runs_pb2.Lease:
        ref = runs_pb2.LeaseRef(run_id="run", role="trainer", fence=self.fence)
        return runs_pb2.Lease(
            ref=ref,
            ttl_s=self.ttl_s,
            run=self._run(),
            store_life=self.store_life,
            durable_after_s=self.durable_after_s,
        )

    async def SubmitRun(self, request: Any, context: Any) -> Any:
        self._take("SubmitRun", request)
        await asyncio.sleep(self.slow_s)
        return runs_pb2.Run(run_id=request.run_id, spec=request.spec, status=types_pb2.RUN_STATUS_PENDING)

    async def GetRun(self, request: Any, context: Any) -> Any:
        self._take("GetRun", request)
        return self._run()

    async def ClaimRun(self, request: Any, context: Any) -> Any:
        self._take("ClaimRun", request)
        if not self.free:
            raise NotReady("the trainer lease is held by another")
        return self._lease()

    async def RenewLease(self, request: Any, context: Any) -> Any:
        self._fenced("RenewLease", request, request)
        return self._lease()

    async def ReleaseLease(self, request: Any, context: Any) -> Any:
        self._fenced("ReleaseLease", request, request)
        return runs_pb2.Empty()

    async def ReserveVersion(self, request: Any, context: Any) -> Any:
        self._fenced("ReserveVersion", request, request)
        self.version += 1
        return runs_pb2.ReserveVersionResponse(version=self.version, publisher_seed=self.seed)

    async def AnnounceVersion(self, request: Any, context: Any) -> Any:
        self._fenced("AnnounceVersion", request, request.lease)
        return runs_pb2.Empty()

    async def Submit(self, request: Any, context: Any) -> Any:
        self._fenced("Submit", request, request.lease)
        await asyncio.sleep(self.slow_s)
        return rollouts_pb2.SubmitResponse(outcomes=[1] * len(request.rollouts))  # type: ignore[list-item]

    async def Acknowledge(self, request: Any, context: Any) -> Any:
        self._fenced("Acknowledge", request, request.lease)
        return runs_pb2.Empty()

    async def Report(self, request: Any, context: Any) -> Any:
        self._fenced("Report", request, request.lease)
        return runs_pb2.Empty()

    async def WatchFinished(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self._take("WatchFinished", request)
        at = int(request.cursor or 0)
        while True:
            grown = self.grown
            for number in range(at + 1, self.finished + 1):
                yield rollouts_pb2.FinishedRollout(
                    cursor=str(number),
                    rollout_id=f"f{number}",
                    group_id="g",
                    episode_id="e",
                    kind=types_pb2.ROLLOUT_KIND_TRAIN,
                    reason=types_pb2.FINISH_REASON_STOP,
                    tokens=bytes(12),
                    attempts=1,
                )
            at = max(at, self.finished)
            await grown.wait()

    async def StreamTokens(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self._take("StreamTokens", request)
        yield rollouts_pb2.TokenChunk(offset=request.offset, tokens=bytes(24))
        if request.offset:
            yield rollouts_pb2.TokenChunk(offset=request.offset + 2, tokens=b"", reason=types_pb2.FINISH_REASON_LENGTH)
        else:
            raise Draining("the service is leaving")


class ScriptedCoordinator:
    """The script, served; `stop` and `start` are a restart on the same port."""

    def __init__(self) -> None:
        self.script = Script()  # type: ignore[abstract]  # what no test calls is UNIMPLEMENTED
        self.address = "127.0.0.1:0"
        self._server: Server | None = None

    async def start(self) -> None:
        services: list[tuple[Callable[..., None], Any, str]] = [
            (runs_pb2_grpc.add_RunsServicer_to_server, self.script, "ebbtide.v1.Runs"),
            (rollouts_pb2_grpc.add_RolloutsServicer_to_server, self.script, "ebbtide.v1.Rollouts"),
            (fleet_pb2_grpc.add_FleetServicer_to_server, self.script, "ebbtide.v1.Fleet"),
        ]
        self._server = Server(ServerSettings(listen=self.address, token=TOKEN), services)
        await self._server.start()
        self.address = self._server.address

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0.0)
            self._server = None
