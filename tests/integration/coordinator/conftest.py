"""A coordinator on a free port, with a real store behind it, and workers that say and do what a test tells them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType
from typing import Any

import grpc
import pytest

from ebbtide.auth.security import ClientSecurity, ServerSettings
from ebbtide.coordinator.service import Coordinator
from ebbtide.coordinator.settings import CoordinatorSettings
from ebbtide.errors import NotReady
from ebbtide.rpc.channel import open_channel
from ebbtide.rpc.server import Server
from ebbtide.rpc.status_table import translated
from ebbtide.store.connection import TermSuperseded
from ebbtide.types.rollout import RolloutKind, RolloutRequest
from ebbtide.types.run import EnvironmentSpec, RunSpec, Sampling
from ebbtide.types.tokens import pack_ids
from ebbtide.v1 import rollouts_pb2, rollouts_pb2_grpc, runs_pb2, runs_pb2_grpc, types_pb2
from ebbtide.wire import to_proto
from tests.fakes.scripted_worker import ScriptedWorker, tokens
from tests.support.waiting import wait_until

TOKEN = "a token"
QUICK = {"recover_grace_s": 0.3, "lease_ttl_s": 1.5, "heartbeat_timeout_s": 30.0, "store_patience_s": 2.0}


class Cluster:
    """One coordinator, restartable, and everything a test does with it."""

    def __init__(self, url: str, *, serving: Mapping[str, Any] = MappingProxyType({}), **settings: Any) -> None:
        """`serving`: further settings of its server."""
        self.url, self._more, self._serving = url, settings, serving
        self._workers: list[ScriptedWorker] = []
        self._channels: list[grpc.aio.Channel] = []
        self._loops: list[asyncio.Task[None]] = []

    async def start(self, *, serve_after_s: float = 0.0) -> "Cluster":
        server = ServerSettings(listen="127.0.0.1:0", token=TOKEN, **self._serving)
        settings = CoordinatorSettings(server=server, store_url=self.url, **(QUICK | self._more))
        self.coordinator = Coordinator(settings)
        services = await self.coordinator.open()
        await asyncio.sleep(serve_after_s)
        self.server = Server(server, services, calls_per_user=settings.calls_per_user)
        await self.server.start()
        self._loops = [asyncio.create_task(loop) for loop in self.coordinator.loops().values()]
        self.channel = self.new_channel()
        self.runs = runs_pb2_grpc.RunsStub(self.channel)
        self.rollouts = rollouts_pb2_grpc.RolloutsStub(self.channel)
        return self

    def new_channel(self, token: str = TOKEN) -> grpc.aio.Channel:
        channel = open_channel(self.server.address, ClientSecurity(token=token))
        self._channels.append(channel)
        return channel

    async def stop(self) -> None:
        """End it as a killed process ends: nothing is said to the store."""
        self.coordinator.leave()
        for loop in self._loops:
            loop.cancel()
        failures = await asyncio.gather(*self._loops, return_exceptions=True)
        for worker in self._workers:
            await worker.break_streams()
        self._workers.clear()
        for channel in self._channels:
            await channel.close()
        self._channels.clear()
        await self.server.stop(0.0)
        await self.coordinator.close()
        for failure in failures:
            if isinstance(failure, Exception) and not isinstance(failure, TermSuperseded):
                raise failure

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    async def worker(self, worker_id: str, *, slots: int = 8, installs: bool = True, **attach: Any) -> ScriptedWorker:
        worker = ScriptedWorker(self.new_channel(), worker_id, slots=slots, installs=installs)
        self._workers.append(worker)
        return await worker.attach(**attach)

    async def call(self, method: Any, request: Any) -> Any:
        with translated("coordinator"):
            return await method(request, timeout=10)

    async def run(self, run_id: str = "r", *, version: bool = True, **spec: Any) -> "ScriptedRun":
        """Submit a run, claim its trainer lease, and announce a first version."""
        fields: dict[str, Any] = {"name": "run", "model": "m", "environment": EnvironmentSpec(name="e")} | spec
        message = to_proto(RunSpec(**fields), types_pb2.RunSpec)
        await self.call(self.runs.SubmitRun, runs_pb2.SubmitRunRequest(run_id=run_id, spec=message))
        run = ScriptedRun(self, run_id)
        await run.claim()
        if version:
            await run.announce(step=0)
        return run


class ScriptedRun:
    """A trainer host's side of one run."""

    def __init__(self, cluster: Cluster, run_id: str) -> None:
        self.cluster, self.run_id = cluster, run_id
        self.lease = runs_pb2.LeaseRef()

    async def claim(self, holder: str = "host", role: str = "trainer") -> runs_pb2.LeaseRef:
        request = runs_pb2.ClaimRunRequest(run_id=self.run_id, role=role, holder=holder)
        self.lease = (await self.cluster.call(self.cluster.runs.ClaimRun, request)).ref
        return self.lease

    async def claim_when_free(self, holder: str) -> None:
        async def claimed() -> bool:
            try:
                await self.claim(holder)
            except NotReady:
                return False
            return True

        await wait_until(claimed)

    async def announce(self, step: int) -> int:
        runs = self.cluster.runs
        version: int = (await self.cluster.call(runs.ReserveVersion, self.lease)).version
        record = types_pb2.PolicyVersion(policy="policy", version=version, step=step, root=bytes([version]) * 32)
        await self.cluster.call(runs.AnnounceVersion, runs_pb2.AnnounceVersionRequest(lease=self.lease, version=record))
        return version

    def request(self, rollout_id: str, **more: Any) -> rollouts_pb2.RolloutRequest:
        fields: dict[str, Any] = {
            "rollout_id": rollout_id, "group_id": "g", "episode_id": f"e.{rollout_id}",
            "prompt_ids": pack_ids([1, 2, 3]), "sampling": Sampling(max_tokens=64), "kind": RolloutKind.TRAIN,
        }  # fmt: skip
        return to_proto(RolloutRequest(**(fields | more)), rollouts_pb2.RolloutRequest)

    async def submit(self, *rollout_ids: str, **more: Any) -> list[int]:
        return await self.send(*(self.request(rollout_id, **more) for rollout_id in rollout_ids))

    async def send(self, *requests: rollouts_pb2.RolloutRequest, step: int | None = None) -> list[int]:
        request = rollouts_pb2.SubmitRequest(lease=self.lease, rollouts=requests, step=step)
        return list((await self.cluster.call(self.cluster.rollouts.Submit, request)).outcomes)

    async def get(self) -> Any:
        return await self.cluster.call(self.cluster.runs.GetRun, runs_pb2.GetRunRequest(run_id=self.run_id))

    async def count(self, name: str) -> Any:
        return (await self.get()).counters.get(name, 0)

    async def finished(
        self, count: int, cursor: str = "", *, grouped: bool = False
    ) -> list[rollouts_pb2.FinishedRollout]:
        request = rollouts_pb2.WatchFinishedRequest(run_id=self.run_id, cursor=cursor, grouped=grouped)
        return await take(self.cluster.rollouts.WatchFinished(request), count)

    async def trajectories(self, count: int, cursor: str = "") -> list[rollouts_pb2.Trajectory]:
        request = rollouts_pb2.WatchTrajectoriesRequest(run_id=self.run_id, cursor=cursor)
        return await take(self.cluster.rollouts.WatchTrajectories(request), count)

    async def events(self, kind: str, count: int) -> list[runs_pb2.RunEvent]:
        """The first events of a kind."""
        found: list[runs_pb2.RunEvent] = []
        stream = self.cluster.runs.WatchRun(runs_pb2.WatchRunRequest(run_id=self.run_id))
        async with asyncio.timeout(10):
            async for event in stream:
                found += [event] if event.kind == kind else []
                if len(found) == count:
                    break
        stream.cancel()
        return found

    async def complete(self, episode_id: str, *rollout_ids: str, drop: str = "", evaluation: bool = False) -> None:
        trajectory = rollouts_pb2.Trajectory(
            episode_id=episode_id, group_id="g", step=1, group_size=1, prompt_ids=pack_ids([1]), tokens=tokens(0, 2),
            loss_mask=b"\x01\x01", reward=1.0,
        )  # fmt: skip
        episode = rollouts_pb2.Episode(episode_id=episode_id, rollout_ids=rollout_ids, drop_reason=drop)
        if not drop and not evaluation:
            episode.trajectory.CopyFrom(trajectory)
        request = rollouts_pb2.CompleteEpisodesRequest(lease=self.lease, episodes=[episode])
        await self.cluster.call(self.cluster.rollouts.CompleteEpisodes, request)

    async def commit(self, *cursors: str, drop: str = "") -> None:
        outcomes = [rollouts_pb2.TrajectoryOutcome(cursor=cursor, drop_reason=drop) for cursor in cursors]
        request = rollouts_pb2.CommitTrajectoriesRequest(lease=self.lease, outcomes=outcomes)
        await self.cluster.call(self.cluster.rollouts.CommitTrajectories, request)

    async def cancel(self, *rollout_ids: str, reason: str = "") -> None:
        request = rollouts_pb2.CancelRequest(lease=self.lease, rollout_ids=rollout_ids, reason=reason)
        await self.cluster.call(self.cluster.rollouts.Cancel, request)

    async def acknowledge(self, *rollout_ids: str, drop: str = "") -> None:
        request = rollouts_pb2.AcknowledgeRequest(lease=self.lease, rollout_ids=rollout_ids, drop_reason=drop)
        await self.cluster.call(self.cluster.rollouts.Acknowledge, request)

    async def finish(self, status: int = types_pb2.RUN_STATUS_FINISHED) -> Any:
        request = runs_pb2.FinishRunRequest(lease=self.lease, status=status)  # type: ignore[arg-type]
        return await self.cluster.call(self.cluster.runs.FinishRun, request)


async def take(stream: Any, count: int) -> list[Any]:
    """The first `count` messages of a stream."""
    found: list[Any] = []
    async with asyncio.timeout(10):
        with translated("coordinator"):
            while len(found) < count:
                message = await stream.read()
                if message is grpc.aio.EOF:
                    break
                found.append(message)
    stream.cancel()
    return found


@pytest.fixture
async def cluster(redis_url: str) -> AsyncIterator[Cluster]:
    made = await Cluster(redis_url).start()
    yield made
    await made.stop()


@pytest.fixture
def cluster_with(redis_url: str) -> Any:
    """Makes clusters with other settings; use with `async with`."""

    @contextlib.asynccontextmanager
    async def make(url: str = "", **settings: Any) -> AsyncIterator[Cluster]:
        made = await Cluster(url or redis_url, **settings).start()
        try:
            yield made
        finally:
            await made.stop()

    return make
