"""A cluster of one run in memory, with the SDK's surface: what the coordinator promises, and nothing more."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Generator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from ebbtide.client.publisher.publisher import PublishReport
from ebbtide.errors import AlreadyExists, LeaseSuperseded, NoCapacity, NotReady
from ebbtide.trainer import training
from ebbtide.types.ids import new_fence
from ebbtide.types.remaining_work import RemainingWork
from ebbtide.types.rollout import (
    Episode,
    FinishedRollout,
    FinishReason,
    RolloutKind,
    RolloutRequest,
    SubmitOutcome,
    Trajectory,
    TrajectoryOutcome,
)
from ebbtide.types.run import Run, RunEvent, RunSpec, RunStatus
from ebbtide.types.tokens import pack_tokens
from ebbtide.types.weights import PolicyVersion

#: Given a request, the response's token ids; None leaves the rollout running.
Engine = Callable[[RolloutRequest], "list[int] | None"]


class Cluster:
    """Coordinator, worker and relay. `log` lists the deeds in order."""

    def __init__(self, spec: RunSpec, engine: Engine, run_id: str = "run-1") -> None:
        self.run = Run(run_id=run_id, spec=spec, status=RunStatus.RUNNING)
        self.engine = engine
        self.events: list[RunEvent] = []
        self.rollouts: dict[str, RolloutRequest] = {}
        self.finished: list[FinishedRollout] = []
        self.over: set[str] = set()
        self.steps: list[tuple[int | None, int]] = []  # step and first step of each submit
        self.trajectories: list[Trajectory] = []
        self.committed: list[TrajectoryOutcome] = []
        self.trained_episodes: list[str] = []
        self.counters: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.fences: dict[str, str] = {}
        self.weights: dict[int, dict[str, Any]] = {}
        self.versions: list[PolicyVersion] = []
        self.reserved = 0
        self.taken = 0  # the relay has versions up to it, of which this run knows nothing
        self.relay = asyncio.Event()  # cleared: versions stay on their way
        self.relay.set()
        self.on_their_way = 0  # versions that wait for it
        self.leases: list[FakeLease] = []
        self.log: list[str] = []
        self.remaining_work = RemainingWork()
        self.asked: list[int] = []  # missing groups at each question for it
        self.changed = asyncio.Event()

    def full(self, rollouts: list[RolloutRequest]) -> bool:
        """Whether the quota has no room for these."""
        return False

    def lease(self, role: str) -> "FakeLease":
        for other in self.leases:
            if other.role == role:
                other.lost.set()
        lease = FakeLease(self, role)
        self.leases.append(lease)
        return lease

    def emit(self, event: RunEvent) -> None:
        if not event.key or not any((one.kind, one.key) == (event.kind, event.key) for one in self.events):
            self.events.append(msgspec.structs.replace(event, cursor=str(len(self.events) + 1)))
        self.bell()

    def bell(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def answer(self) -> None:
        """Have the engine generate what it will."""
        finished = {one.rollout_id for one in self.finished}
        for request in list(self.rollouts.values()):
            if request.rollout_id in finished | self.over or (ids := self.engine(request)) is None:
                continue
            version = request.min_version or self.versions[-1].version
            self.finished.append(
                FinishedRollout(
                    rollout_id=request.rollout_id,
                    group_id=request.group_id,
                    episode_id=request.episode_id,
                    reason=FinishReason.STOP,
                    tokens=pack_tokens(ids, [-1.0] * len(ids), version),
                    cursor=str(len(self.finished) + 1),
                    turn=request.turn,
                    kind=request.kind,
                )
            )
        self.bell()

    def reserve(self) -> int:
        self.reserved += 1
        return self.reserved

    def announce(self, step: int, number: int = 0) -> PolicyVersion:
        number = number or self.reserve()
        version = PolicyVersion(policy="policy", version=number, parent=number - 1, step=step)
        self.versions.append(version)
        self.emit(RunEvent(kind="version", key=str(number), values={"version": float(number), "step": float(step)}))
        return version

    def end(self, rollout_id: str, reason: str) -> None:
        if rollout_id in self.over:
            return
        self.over.add(rollout_id)
        request = self.rollouts[rollout_id]
        if request.kind is RolloutKind.TRAIN and reason:
            self.dropped[reason] += 1

    def settled(self) -> bool:
        return self.counters["submitted"] == self.counters["trained"] + sum(self.dropped.values())

    def finish(self, status: RunStatus, message: str) -> Run:
        self.run = msgspec.structs.replace(self.run, status=status, message=message)
        for lease in self.leases:
            lease.lost.set()
        self.bell()
        return self.run

    def named(self, kind: str) -> list[RunEvent]:
        return [event for event in self.events if event.kind == kind]


class FakeClient:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    async def run(self, run_id: str) -> Run:
        assert run_id == self.cluster.run.run_id
        return self.cluster.run

    async def watch(self, run_id: str, cursor: str = "") -> AsyncIterator[RunEvent]:
        cluster, place = self.cluster, int(cursor or 0)
        while True:
            changed = cluster.changed
            while place < len(cluster.events):
                place += 1
                yield cluster.events[place - 1]
            if cluster.run.status.ended:
                return
            await changed.wait()

    @asynccontextmanager
    async def claim(self, run_id: str | None, role: str, *, holder: str) -> AsyncIterator["FakeLease"]:
        yield self.cluster.lease(role)


class FakeLease:
    def __init__(self, cluster: Cluster, role: str) -> None:
        self.cluster = cluster
        self.role = role
        self.run = cluster.run
        self.run_id = cluster.run.run_id
        self.lost = asyncio.Event()
        self.fence = new_fence()

    def _check(self, deed: str) -> None:
        if self.lost.is_set():
            raise LeaseSuperseded("superseded")
        self.cluster.log.append(f"{self.role}:{deed}")

    async def remaining_work(self, *, groups: int, fleet: str = "", wait_s: float = 0.0) -> RemainingWork:
        self.cluster.asked.append(groups)
        if fleet and fleet == self.cluster.remaining_work.fleet:
            await asyncio.sleep(wait_s)
        return self.cluster.remaining_work

    async def submit_rollouts(
        self, rollouts: Iterable[RolloutRequest], *, wait: bool = True, step: int | None = None, first_step: int = 0
    ) -> list[SubmitOutcome]:
        await asyncio.sleep(0)
        self._check("submit")
        rollouts = list(rollouts)
        if self.cluster.full(rollouts):
            raise NoCapacity("the run's quota is used up", retry_after_s=0.01)
        self.cluster.steps.append((step, first_step))
        first_step = max(first for _, first in self.cluster.steps)
        outcomes = []
        for request in rollouts:
            known = self.cluster.rollouts.get(request.rollout_id)
            if known is not None and known != request:
                raise AlreadyExists(f"{request.rollout_id} has another body")
            past = known is None and step is not None and step < first_step
            if past or request.rollout_id in self.cluster.over:
                outcomes.append(SubmitOutcome.COMPLETED)
            elif known is not None:
                outcomes.append(SubmitOutcome.KNOWN)
            else:
                self.cluster.rollouts[request.rollout_id] = request
                self.cluster.counters["submitted" if request.kind is RolloutKind.TRAIN else "eval"] += 1
                outcomes.append(SubmitOutcome.ACCEPTED)
        self.cluster.answer()
        return outcomes

    async def finished(self, cursor: str = "") -> AsyncIterator[FinishedRollout]:
        place = int(cursor or 0)
        while True:
            changed = self.cluster.changed
            while place < len(self.cluster.finished):
                place += 1
                if self.cluster.finished[place - 1].rollout_id not in self.cluster.over:
                    yield self.cluster.finished[place - 1]
            await changed.wait()
            self._check("finished")

    async def complete_episodes(self, episodes: Iterable[Episode]) -> None:
        await asyncio.sleep(0)
        self._check("complete")
        for episode in episodes:
            fresh = [name for name in episode.rollout_ids if name not in self.cluster.over]
            for name in episode.rollout_ids:
                self.cluster.end(name, episode.drop_reason)
            if fresh and episode.trajectory is not None:
                cursor = str(len(self.cluster.trajectories) + 1)
                self.cluster.trajectories.append(msgspec.structs.replace(episode.trajectory, cursor=cursor))
        self.cluster.bell()

    async def cancel_rollouts(self, rollout_ids: Iterable[str], reason: str = "") -> None:
        self._check("cancel")
        for name in rollout_ids:
            self.cluster.end(name, reason)

    async def trajectories(self, cursor: str = "") -> AsyncIterator[Trajectory]:
        place = int(cursor or 0)
        while True:
            changed = self.cluster.changed
            gone = {outcome.cursor for outcome in self.cluster.committed}
            while place < len(self.cluster.trajectories):
                place += 1
                if str(place) not in gone:
                    yield self.cluster.trajectories[place - 1]
            await changed.wait()
            self._check("trajectories")

    async def commit(self, outcomes: Iterable[TrajectoryOutcome]) -> None:
        self._check("commit")
        gone = {outcome.cursor for outcome in self.cluster.committed}
        for outcome in outcomes:
            if outcome.cursor in gone:
                continue
            self.cluster.committed.append(outcome)
            trajectory = self.cluster.trajectories[int(outcome.cursor) - 1]
            if outcome.drop_reason:
                self.cluster.dropped[outcome.drop_reason] += trajectory.rollouts
            else:
                self.cluster.counters["trained"] += trajectory.rollouts
                self.cluster.trained_episodes.append(trajectory.episode_id)
        self.cluster.bell()

    async def publishing(self, tensors: Any, *, step: int, parent: int = 0) -> "FakePublishing":
        self._check(f"publish {step}")
        number = self.cluster.reserve()
        self.cluster.weights[number] = {name: tensor.clone() for name, tensor in tensors}
        return FakePublishing(self, number, step)

    async def report(self, events: Iterable[RunEvent]) -> None:
        self._check("report")
        for event in events:
            self.cluster.emit(event)

    async def finish(self, status: RunStatus = RunStatus.FINISHED, message: str = "") -> Run:
        self._check("finish")
        if status is RunStatus.FINISHED and not self.cluster.settled():
            raise NotReady("rollouts are neither trained nor dropped")
        return self.cluster.finish(status, message)


class FakePublishing:
    """A version on its way, announced a little later."""

    pause_s = 0.001

    def __init__(self, lease: FakeLease, number: int, step: int) -> None:
        self.number = number
        self._task = asyncio.create_task(self._announce(lease, step))

    async def _announce(self, lease: FakeLease, step: int) -> PolicyVersion:
        await asyncio.sleep(0)
        lease.cluster.on_their_way += 1
        await lease.cluster.relay.wait()
        lease.cluster.on_their_way -= 1
        if self.number <= lease.cluster.taken:
            raise AlreadyExists(f"version {self.number} is committed with another root")
        lease._check(f"announce {step}")
        return lease.cluster.announce(step, self.number)

    def __await__(self) -> Generator[Any, None, PolicyVersion]:
        return self._task.__await__()

    @property
    def report(self) -> PublishReport:
        kind: Any = "patch" if self.number > 1 else "keyframe"
        return PublishReport(
            version=self._task.result(),
            kind=kind,
            base=self.number - 1,
            bytes_sent=100,
            dense_bytes=1000,
            density=0.03,
            pause_s=self.pause_s,
            encode_s=0.002,
            upload_s=0.003,
        )


@pytest.fixture
async def make_cluster() -> AsyncIterator[Callable[..., Cluster]]:
    """A process that ends while torch computes in a thread aborts, so a test waits for what it has begun."""
    yield Cluster
    await training._compute(int)


@pytest.fixture
def make_client() -> Callable[[Cluster], FakeClient]:
    return FakeClient
