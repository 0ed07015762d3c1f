"""Makes the calls of a run's trainer or driver under its lease, until another holder claims the run."""

import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from ebbtide.client.held_lease import LEAVE_S
from ebbtide.client.rollout_lease import RolloutLease, in_batches, trajectory_size
from ebbtide.client.service_peer import ServicePeer
from ebbtide.errors import EbbtideError, InvalidRequest
from ebbtide.rpc.channel import DURABLE_TIMEOUT_S
from ebbtide.types.ids import new_fence
from ebbtide.types.rollout import Episode, FinishedRollout, Trajectory, TrajectoryOutcome
from ebbtide.types.run import Run, RunEvent, RunStatus
from ebbtide.types.session import Session, UnverifiedSession
from ebbtide.types.weights import PolicyVersion
from ebbtide.types.work_left import WorkLeft
from ebbtide.v1 import rollouts_pb2, runs_pb2, sessions_pb2, types_pb2
from ebbtide.v1.runs_pb2_grpc import RunsStub
from ebbtide.v1.sessions_pb2_grpc import SessionsStub
from ebbtide.wire.record_conversion import from_proto, to_proto

if TYPE_CHECKING:
    from ebbtide.client.publisher.publisher import Publisher, Publishing, Tensors
    from ebbtide.client.publisher.rank_exchange import RankExchange
    from ebbtide.client.relay_client import RelayClient

T = TypeVar("T")
log = logging.getLogger(__name__)


class Lease(RolloutLease):
    """Made by `Client.claim`; renews itself until it is released.

    Once another holder has claimed the run, or the run has ended, `lost` is set and every call raises
    `LeaseSuperseded`: step down then. All calls are idempotent and are repeated while the coordinator is away; after
    the client's patience they raise `Unavailable`.
    """

    def __init__(self, peer: ServicePeer, claimed: runs_pb2.Lease, relay: "Callable[[], RelayClient]") -> None:
        super().__init__(peer, claimed)
        self._runs = RunsStub(peer.channel)
        self._relay = relay
        self._publisher: Publisher | None = None

    # -- rollouts ------------------------------------------------------------------------------------------------

    async def finished(self, cursor: str = "") -> AsyncGenerator[FinishedRollout, None]:
        """Yield finished rollouts after `cursor`, oldest first, then new ones; a reconnect can repeat some."""
        request = rollouts_pb2.WatchFinishedRequest(run_id=self.run_id, cursor=cursor, grouped=True)
        async for message in self._follow(lambda: self._rollouts.WatchFinished(request)):
            for one in (message, *message.others):
                request.cursor = one.cursor
                yield from_proto(one, FinishedRollout)

    async def acknowledge(self, rollout_ids: Iterable[str], drop_reason: str = "") -> None:
        """Count finished rollouts as trained, or as dropped with a reason, and delete their data."""
        for batch in in_batches(rollout_ids):
            request = rollouts_pb2.AcknowledgeRequest(lease=self._fence, rollout_ids=batch, drop_reason=drop_reason)
            await self._kept(self._rollouts.Acknowledge, request)

    # -- episodes and trajectories -------------------------------------------------------------------------------

    async def complete_episodes(self, episodes: Iterable[Episode]) -> None:
        """Turn episodes into trajectories or drop them, and delete their rollouts' data."""
        for batch in in_batches(episodes, _episode_size):
            request = rollouts_pb2.CompleteEpisodesRequest(
                lease=self._fence, episodes=[to_proto(item, rollouts_pb2.Episode) for item in batch]
            )
            await self._kept(self._rollouts.CompleteEpisodes, request)

    async def trajectories(self, cursor: str = "") -> AsyncGenerator[Trajectory, None]:
        """Yield trajectories after `cursor`, oldest first, then new ones; a reconnect can repeat some."""
        request = rollouts_pb2.WatchTrajectoriesRequest(run_id=self.run_id, cursor=cursor)
        async for message in self._follow(lambda: self._rollouts.WatchTrajectories(request)):
            request.cursor = message.cursor
            yield from_proto(message, Trajectory)

    async def commit(self, outcomes: Iterable[TrajectoryOutcome]) -> None:
        """Count trajectories as trained or dropped and delete them. Call it after a checkpoint with them is durable."""
        for batch in in_batches(outcomes):
            request = rollouts_pb2.CommitTrajectoriesRequest(
                lease=self._fence, outcomes=[to_proto(item, rollouts_pb2.TrajectoryOutcome) for item in batch]
            )
            await self._kept(self._rollouts.CommitTrajectories, request)

    # -- weights and the run itself ------------------------------------------------------------------------------

    async def publish(self, tensors: "Tensors", *, step: int, parent: int = 0) -> PolicyVersion:
        """Publish weights as the policy's next version, and announce it once the relay holds all of it.

        `tensors` is a mapping or an iterable of `NamedTensor` or (name, tensor) pairs, of numpy or of torch on any
        device; it is read once, one tensor at a time. A copy stays in memory, so that the next version sends only its
        changes. Raises `InvalidRequest` naming a tensor, `NoCapacity` if the relay cannot hold the version, and
        `Unavailable` naming the service that is down.
        """
        return await (await self.publishing(tensors, step=step, parent=parent))

    async def publishing(self, tensors: "Tensors", *, step: int, parent: int = 0) -> "Publishing":
        """Begin to `publish`; returns when `tensors` are copied and can change again. Await the result for the version.

        Only one version is published at a time; the next call waits for it. `release` waits some seconds for it, then
        abandons it.
        """
        return await self.publisher().publish(tensors, step=step, parent=parent)

    def publisher(self, exchange: "RankExchange | None" = None) -> "Publisher":
        """Return the lease's publisher; the first call makes it. With an `exchange`, it is rank 0's among several ranks
        that publish together; the others use `Client.publisher`. Raises `InvalidRequest` if the first call had another
        exchange, or none.
        """
        if self._publisher is None:
            from ebbtide.client.publisher.publisher import Authority

            authority = Authority(self._reserve_version, self._announce_version)
            self._publisher = self._relay().publisher(
                self.run_id,
                self.run.spec.policy,
                authority=authority,
                exchange=exchange,
                config=_config(self.run.spec.model),
            )
        elif exchange is not None and exchange is not self._publisher.exchange:
            text = "the lease's publisher has another exchange; pass it to the first call that publishes"
            raise InvalidRequest(text, field="exchange")
        return self._publisher

    async def release(self) -> None:
        if self._publisher is not None:
            await self._publisher.aclose(0.0 if self.lost.is_set() else LEAVE_S)
            self._publisher = None
        await super().release()

    async def _reserve_version(self) -> tuple[int, bytes]:
        reserved = await self._call(self._runs.ReserveVersion, self._fence, timeout_s=DURABLE_TIMEOUT_S)
        return reserved.version, reserved.publisher_seed

    async def _announce_version(self, version: PolicyVersion) -> None:
        request = runs_pb2.AnnounceVersionRequest(lease=self._fence, version=to_proto(version, types_pb2.PolicyVersion))
        await self._kept(self._runs.AnnounceVersion, request)

    async def unverified(self) -> AsyncGenerator[UnverifiedSession, None]:
        """Yield the sessions that wait for the verdicts of their verifiers, oldest first, then new ones as they end."""
        request, pieces = sessions_pb2.WatchUnverifiedRequest(run_id=self.run_id), list[UnverifiedSession]()
        stub = SessionsStub(self._peer.channel)
        async with aclosing(self._follow(lambda: stub.WatchUnverified(request))) as messages:
            async for message in messages:
                if not message.piece:  # a stream that was resumed begins the session again
                    pieces.clear()
                pieces.append(from_proto(message, UnverifiedSession))
                if message.cursor:
                    request.cursor = message.cursor
                    joined = tuple(one for piece in pieces for one in piece.trajectories)
                    yield replace(pieces[0], trajectories=joined, cursor=message.cursor)

    async def post_verdict(self, session_id: str, *, reward: float | None = None, drop_reason: str = "") -> Session:
        """End a session that waits for its verdict, with a reward or dropped. One that does not wait is returned as it
        is. Raises `NotFound`.
        """
        request = sessions_pb2.PostVerdictRequest(
            lease=self._fence, session_id=session_id, reward=reward, drop_reason=drop_reason
        )
        return from_proto(await self._kept(SessionsStub(self._peer.channel).PostVerdict, request), Session)

    async def work_left(self, *, groups: int, fleet: str = "", wait_s: float = 0.0) -> WorkLeft:
        """What the run still generates, of the oldest `groups` open groups, and the engines that serve it.

        Returns at once if `fleet` is not the present one, else when it changes, or after `wait_s` (at most 20 s).
        """
        request = runs_pb2.ReadWorkLeftRequest(lease=self._fence, groups=groups, fleet=fleet, wait_s=wait_s)
        return from_proto(await self._call(self._runs.ReadWorkLeft, request), WorkLeft)

    async def release_worker(self, worker_id: str) -> None:
        """Have a spot worker of the run hand over and leave. Raises `NotReady` if the run may not, and `NotFound`."""
        request = runs_pb2.ReleaseWorkerRequest(lease=self._fence, worker_id=worker_id)
        await self._call(self._runs.ReleaseWorker, request)

    async def report(self, events: Sequence[RunEvent]) -> None:
        """Append events to the run, once per kind and key."""
        for batch in in_batches(
            events, lambda event: 64 * (len(event.values) + len(event.labels)) + len(event.message)
        ):
            messages = [to_proto(item, runs_pb2.RunEvent) for item in batch]
            for message in messages if self._journal.needed else ():
                message.key = message.key or new_fence()  # a repeated event is stored once
            await self._kept(self._runs.Report, runs_pb2.ReportRequest(lease=self._fence, events=messages))

    async def finish(self, status: RunStatus = RunStatus.FINISHED, message: str = "") -> Run:
        """End the run. Raises `NotReady` while training rollouts are still neither trained nor dropped."""
        await self._durable()  # an ended run takes no call that the store has forgotten
        request = runs_pb2.FinishRunRequest(
            lease=self._fence, status=types_pb2.RunStatus.ValueType(status.value), message=message
        )
        ended = await self._call(self._runs.FinishRun, request, timeout_s=DURABLE_TIMEOUT_S)
        self.run = from_proto(ended, Run)
        return self.run


def _config(model: str) -> bytes:
    """Read the configuration of the run's model, if the model is on this machine."""
    from ebbtide.weights import read_config

    try:
        return read_config(Path(model))
    except (EbbtideError, OSError) as error:
        log.warning("versions carry no config.json, so workers of other models cannot serve the run: %s", error)
        return b""


def _episode_size(episode: Episode) -> int:
    ids = sum(len(name) + 2 for name in episode.rollout_ids)
    return ids + (trajectory_size(episode.trajectory) if episode.trajectory else 256)
