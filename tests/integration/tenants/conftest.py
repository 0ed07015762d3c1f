"""A coordinator that knows its users by their tokens: one who goes to a limit, and another who works."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from ebbtide.auth.role_tokens import mint, signing_key
from ebbtide.auth.roles import Role
from ebbtide.cli.credentials import signing_keys
from ebbtide.v1 import rollouts_pb2, rollouts_pb2_grpc, runs_pb2, runs_pb2_grpc, types_pb2
from tests.fakes.scripted_worker import ScriptedWorker
from tests.integration.coordinator.conftest import Cluster, ScriptedRun, take

ACCEPTED = 1
STOP = types_pb2.FINISH_REASON_STOP


class Tenant:
    """A user with a connection of their own."""

    call = Cluster.call
    run = Cluster.run

    def __init__(self, cluster: Cluster, token: str) -> None:
        self.coordinator = cluster.coordinator
        self.channel = cluster.new_channel(token)
        self.runs: Any = runs_pb2_grpc.RunsStub(self.channel)
        self.rollouts: Any = rollouts_pb2_grpc.RolloutsStub(self.channel)


class Block:
    """The coordinator, its worker, and two users."""

    def __init__(self, cluster: Cluster, keys: Path) -> None:
        self.cluster = cluster
        self._signer = signing_key((keys.parent / "tokens.key").read_bytes(), field="key")
        self.greedy, self.other = self.tenant("greedy"), self.tenant("other")
        self._rounds = 0
        self._worker: ScriptedWorker | None = None

    def tenant(self, name: str) -> Tenant:
        return Tenant(self.cluster, mint(self._signer, Role.TRAINER, ttl_s=600.0, name=name))

    async def other_works(self) -> None:
        """The other user submits a run, and has a rollout generated, read and acknowledged."""
        self._rounds += 1
        name = f"others-{self._rounds}"
        run: ScriptedRun = await self.other.run(name)  # type: ignore[misc]  # a Tenant calls as a Cluster does
        worker = self._worker = self._worker or await self.cluster.worker("w")
        assert await run.submit(name) == [ACCEPTED]
        await worker.has(name)
        await worker.add(name, 0, 2)
        await worker.add(name, 2, 1, finish=STOP)
        (finished,) = await run.finished(1)
        assert (finished.rollout_id, len(finished.tokens)) == (name, 3 * 12)
        stream = self.other.rollouts.StreamTokens(rollouts_pb2.StreamTokensRequest(run_id=name, rollout_id=name))
        assert b"".join(chunk.tokens for chunk in await take(stream, 1)) == finished.tokens
        events = [runs_pb2.RunEvent(kind="step", key=name)]
        await self.other.call(self.other.runs.Report, runs_pb2.ReportRequest(lease=run.lease, events=events))  # type: ignore[misc]
        assert [event.key for event in await run.events("step", 1)] == [name]
        await run.complete(f"e.{name}", name)
        (trajectory,) = await run.trajectories(1)
        await run.commit(trajectory.cursor)
        await run.finish()


@pytest.fixture
def block_with(redis_url: str, tmp_path: Path) -> Any:
    """Makes blocks with other settings; use with `async with`."""

    @contextlib.asynccontextmanager
    async def make(**settings: Any) -> AsyncIterator[Block]:
        keys = signing_keys.make(tmp_path / "keys")
        serving = {"token_keys": str(keys)} | settings.pop("serving", {})
        made = await Cluster(redis_url, serving=serving, **settings).start()
        try:
            yield Block(made, keys)
        finally:
            await made.stop()

    return make
