"""Makes the calls of a run's trainer or driver, or of a gateway, under a lease, until another holder claims the run.

Rollouts are submitted and cancelled in messages that fit. What the store may still forget is sent again by the lease.
So a gateway that dies loses nothing that was acknowledged: another one submits the same rollouts again, under the same
ids, and reads on.
"""

import logging
import math
import re
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
from msgspec.structs import replace

from ebbtide.client.held_lease import LEAVE_S, HeldLease
from ebbtide.client.service_peer import ServicePeer
from ebbtide.errors import AlreadyExists, EbbtideError, InvalidRequest, LeaseSuperseded, NoCapacity, RateLimited
from ebbtide.hub_models import cached_model
from ebbtide.rpc.channel import DURABLE_TIMEOUT_S
from ebbtide.types.ids import new_fence
from ebbtide.types.remaining_work import RemainingWork
from ebbtide.types.rollout import (
    DropReason,
    Episode,
    FinishedRollout,
    FinishReason,
    RolloutRequest,
    SampledResponse,
    SubmitOrder,
    SubmitOutcome,
    TokenChunk,
    Trajectory,
    TrajectoryOutcome,
)
from ebbtide.types.run import Run, RunEvent, RunStatus, Sampling
from ebbtide.types.session import (
    KeyUsage,
    MeteredKey,
    Session,
    SessionEnd,
    SessionState,
    SessionTurn,
    TurnPage,
    UnverifiedSession,
)
from ebbtide.types.weights import PolicyVersion
from ebbtide.v1 import rollouts_pb2, runs_pb2, sessions_pb2, types_pb2
from ebbtide.v1.rollouts_pb2_grpc import RolloutsStub
from ebbtide.v1.runs_pb2_grpc import RunsStub
from ebbtide.v1.sessions_pb2_grpc import SessionsStub
from ebbtide.wire import from_proto, to_proto

if TYPE_CHECKING:
    from ebbtide.client.publisher.publisher import Publisher, Publishing, Tensors
    from ebbtide.client.publisher.rank_exchange import RankExchange
    from ebbtide.client.relay_client import RelayClient


T = TypeVar("T")
#: Half of a message's 4 MiB, so that ids and framing fit beside the payload.
_BATCH_BYTES: Final = 2 << 20
#: Small enough for the store to take in one script without delaying other calls.
_BATCH_ITEMS: Final = 1024


class RolloutLease(HeldLease):
    """Base of the leases under which rollouts are submitted."""

    def __init__(self, peer: ServicePeer, claimed: runs_pb2.Lease) -> None:
        super().__init__(peer, claimed)
        self._rollouts = RolloutsStub(peer.channel)

    async def submit_rollouts(
        self,
        rollouts: Iterable[RolloutRequest],
        *,
        wait: bool = True,
        step: int | None = None,
        first_step: int = 0,
        key: MeteredKey | None = None,
    ) -> list[SubmitOutcome]:
        """Queue rollouts, idempotent by id; returns an outcome for each, in order.

        With `wait`, waits for room in the queue or quota as long as the lease lasts; otherwise raises `NoCapacity`.
        Raises `InvalidRequest` naming the field, `AlreadyExists` for the id of another rollout.

        `step`: that the rollouts are for, the same whenever they are asked for. `first_step`: no holder submits more
        rollouts of lower steps to the run. Both let a later holder that submits the same ids again learn what is over,
        however long ago that was. Without a step it learns this of the ids that ended last.

        `key`: of a gateway's client, whose account is charged. Raises `RateLimited` or `BudgetSpent` beyond its limits.
        """
        outcomes: list[SubmitOutcome] = []
        for batch in in_batches(rollouts, lambda item: len(item.prompt_ids) + 256):
            request = rollouts_pb2.SubmitRequest(
                lease=self._fence,
                rollouts=[to_proto(item, rollouts_pb2.RolloutRequest) for item in batch],
                key=to_proto(key, rollouts_pb2.MeteredKey) if key else None,
            )
            while True:
                try:
                    answer = await self._submit(request, self._journal.order(step=step, first_step=first_step))
                    break
                except NoCapacity as error:
                    if not wait or isinstance(error, RateLimited):
                        raise
                    await self._pause(error.retry_after_s)
            outcomes.extend(SubmitOutcome(outcome) for outcome in answer.outcomes)
        return outcomes

    async def _submit(self, request: rollouts_pb2.SubmitRequest, order: SubmitOrder) -> rollouts_pb2.SubmitResponse:
        """Submit under a number that no other submit has: what was refused comes again under another one."""
        request.sequence, request.settled, request.first_step = order.sequence, order.settled, order.first_step
        if order.step is not None:
            request.step = order.step
        try:
            return await self._kept(self._rollouts.Submit, request, order.sequence)
        except BaseException:
            self._journal.settle(order.sequence)
            raise

    async def cancel_rollouts(self, rollout_ids: Iterable[str], reason: str = "") -> None:
        """End rollouts in any state; training rollouts count as dropped with `reason` (default "cancelled").
        Requests of gateways finish as they are, and stay readable.
        """
        for batch in in_batches(rollout_ids):
            request = rollouts_pb2.CancelRequest(lease=self._fence, rollout_ids=batch, reason=reason)
            await self._kept(self._rollouts.Cancel, request)


def in_batches(items: Iterable[T], size: Callable[[T], int] = lambda _: 0) -> Iterator[list[T]]:
    """Cut `items`, in order, into lists that fit a message; `size` gives an item's payload in bytes."""
    batch: list[T] = []
    total = 0
    for item in items:
        weight = size(item)
        if batch and (len(batch) >= _BATCH_ITEMS or total + weight > _BATCH_BYTES):
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += weight
    if batch:
        yield batch


def trajectory_size(end: Trajectory) -> int:
    """Bytes that a trajectory takes in a message, about."""
    return 256 + len(end.prompt_ids) + len(end.tokens) + len(end.loss_mask) + sum(map(_response_size, end.responses))


def _response_size(one: SampledResponse) -> int:
    return 64 + 5 * len(one.sampling.stop_token_ids)


log = logging.getLogger(__name__)

#: Ids that `Lease.generate` gives, with the step.
_GENERATED: Final = re.compile(r"s(\d+)\.g\d+\.\d+", re.ASCII)


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
        self._dead: dict[str, int] = {}  # dead letters of `generate` that are not acknowledged -> step

    # -- rollouts ------------------------------------------------------------------------------------------------

    async def finished(self, cursor: str = "") -> AsyncGenerator[FinishedRollout, None]:
        """Yield finished rollouts after `cursor`, oldest first, then new ones; a reconnect can repeat some."""
        request = rollouts_pb2.WatchFinishedRequest(run_id=self.run_id, cursor=cursor, grouped=True)
        async for message in self._follow(lambda: self._rollouts.WatchFinished(request)):
            for one in (message, *message.others):
                request.cursor = one.cursor
                yield from_proto(one, FinishedRollout)

    async def acknowledge(self, rollout_ids: Iterable[str], drop_reason: str = "") -> None:
        """Count finished rollouts as trained, or as dropped with a reason, and delete their data.

        Responses of `generate` take the dead letters of their step, and of those before it, along.
        """
        names = list(rollout_ids)
        steps = [int(found[1]) for name in names if (found := _GENERATED.fullmatch(name))]
        await self._acknowledge(names, drop_reason)
        await self._drop_dead(max(steps, default=-1))

    async def _drop_dead(self, step: float) -> None:
        due = [name for name, of in self._dead.items() if of <= step]
        await self._acknowledge(due, DropReason.DEAD_LETTERED)
        for name in due:
            self._dead.pop(name, None)

    async def _acknowledge(self, names: Sequence[str], drop_reason: str) -> None:
        for batch in in_batches(names):
            request = rollouts_pb2.AcknowledgeRequest(lease=self._fence, rollout_ids=batch, drop_reason=drop_reason)
            await self._kept(self._rollouts.Acknowledge, request)

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        samples: int,
        step: int,
        version: PolicyVersion,
        sampling: Sampling | None = None,
    ) -> list[list[FinishedRollout]]:
        """Generate `samples` responses to each prompt (token ids) of a step, all by one version, and wait for them.

        Returns them by prompt. A response that could not be generated is left out, and counted as dropped once you
        acknowledge the others, after you have trained on them. `sampling`: None takes the run's. A trainer that
        restarts and asks again for a step gets what is there of it. Raises `AlreadyExists` if it asks with other
        prompts, or if some of the step's responses were acknowledged, and `LeaseSuperseded` if the run ends meanwhile.
        For several turns, or versions that may differ, use `submit_rollouts` and `finished`.
        """
        from ebbtide.types.tokens import pack_ids  # numpy, which programs that submit do not need

        groups = [[f"s{step}.g{group}.{sample}" for sample in range(samples)] for group in range(len(prompts))]
        asked = [
            RolloutRequest(
                rollout_id=name,
                group_id=f"s{step}.g{group}",
                episode_id=name,
                prompt_ids=pack_ids(prompts[group]),
                sampling=sampling or self.run.spec.sampling,
                min_version=version.version,
                max_version=version.version,
            )
            for group, names in enumerate(groups)
            for name in names
        ]
        outcomes = await self.submit_rollouts(asked, step=step, first_step=step)
        if SubmitOutcome.COMPLETED in outcomes:
            text = f"responses of step {step} were acknowledged: go on with the next step, or submit the run again"
            raise AlreadyExists(text)
        missing, found = {one.rollout_id for one in asked}, dict[str, FinishedRollout]()
        async with aclosing(self.finished()) as finished:
            while missing:
                if (rollout := await anext(finished, None)) is None:
                    raise LeaseSuperseded(f"run {self.run_id} has ended, and nobody generates for it any more")
                dead = rollout.reason is FinishReason.DEAD_LETTERED
                if dead and (generated := _GENERATED.fullmatch(rollout.rollout_id)):
                    self._dead[rollout.rollout_id] = int(generated[1])
                if rollout.rollout_id in missing:  # others are of earlier steps, or repeated
                    missing.remove(rollout.rollout_id)
                    if not dead:
                        found[rollout.rollout_id] = rollout
        return [[found[name] for name in names if name in found] for names in groups]

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

    async def remaining_work(self, *, groups: int, fleet: str = "", wait_s: float = 0.0) -> RemainingWork:
        """What the run still generates, of the oldest `groups` open groups, and the engines that serve it.

        Returns at once if `fleet` is not the present one, else when it changes, or after `wait_s` (at most 20 s).
        """
        request = runs_pb2.ReadRemainingWorkRequest(lease=self._fence, groups=groups, fleet=fleet, wait_s=wait_s)
        return from_proto(await self._call(self._runs.ReadWorkLeft, request), RemainingWork)

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
        await self._drop_dead(math.inf)
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
        return read_config(cached_model(model) or Path(model))
    except (EbbtideError, OSError) as error:
        log.warning("versions carry no config.json, so workers of other models cannot serve the run: %s", error)
        return b""


def _episode_size(episode: Episode) -> int:
    ids = sum(len(name) + 2 for name in episode.rollout_ids)
    return ids + (trajectory_size(episode.trajectory) if episode.trajectory else 256)


#: Sessions per page of a list.
_SESSION_PAGE = 500


class GatewayLease(RolloutLease):
    """Made by `Client.claim_gateway`; renews itself until it is released. Each gateway has its own, by its holder.

    `submit_rollouts` takes rollouts of the kind `REQUEST` only. Once another process has claimed under the same holder,
    or the run has ended, `lost` is set, and every call but `tokens` raises `LeaseSuperseded`. All calls are idempotent
    and are repeated while the coordinator is away; after the client's patience they raise `Unavailable`.
    """

    def __init__(self, peer: ServicePeer, claimed: runs_pb2.Lease) -> None:
        super().__init__(peer, claimed)
        self._sessions = SessionsStub(peer.channel)

    async def tokens(self, rollout_id: str, offset: int = 0) -> AsyncGenerator[TokenChunk, None]:
        """Yield a rollout's tokens from `offset` as they are stored; the last chunk has a reason, and for a dead letter
        a message. Raises `NotFound` after the time that requests are kept, and `LeaseSuperseded` if the run ends first.
        """
        from ebbtide.types.tokens import token_count  # numpy, which programs that submit do not need

        request = rollouts_pb2.StreamTokensRequest(run_id=self.run_id, rollout_id=rollout_id, offset=offset)
        async for message in self._peer.follow(lambda: self._rollouts.StreamTokens(request)):
            request.offset = message.offset + token_count(message.tokens)
            chunk = from_proto(message, TokenChunk)
            yield chunk
            if chunk.reason is not None:
                return

    async def refreshed(self) -> Run:
        """Return the run's present state, which `run` tells until the next renewal. Raises `NotFound`."""
        request = runs_pb2.GetRunRequest(run_id=self.run_id)
        self.run = from_proto(await self._peer.call(RunsStub(self._peer.channel).GetRun, request), Run)
        return self.run

    async def key_usage(self, owner: str) -> KeyUsage:
        """Return what the keys of an owner have used of the run; nothing if they have no limits."""
        request = rollouts_pb2.ListKeyUsageRequest(run_id=self.run_id, owner=owner)
        found = (await self._call(self._rollouts.ListKeyUsage, request)).usage
        return from_proto(found[0], KeyUsage) if found else KeyUsage(owner=owner)

    # -- sessions ------------------------------------------------------------------------------------------------

    async def open_session(self, session_id: str, owner: str, *, group_id: str = "", record: bytes = b"") -> Session:
        """Open a session, or return it as it is stored. `group_id`: of its trajectories; empty: the session's id.

        Raises `NotFound` if the id is another owner's, `NotReady` if the session has ended and was forgotten, and
        `NoCapacity` while the run's quota is used up.
        """
        request = sessions_pb2.OpenSessionRequest(
            lease=self._fence, session_id=session_id, owner=owner, group_id=group_id, record=record
        )
        return from_proto(await self._kept(self._sessions.OpenSession, request), Session)

    async def add_turn(
        self, session_id: str, owner: str, turn: SessionTurn, *, key: MeteredKey | None = None, tokens: int = 0
    ) -> SessionTurn:
        """Add a turn, before its rollouts are submitted, or return the one of this request as it is stored.

        `key`, `tokens`: the client's key, and what the turn may come to; raises `RateLimited` or `BudgetSpent` if a
        submit of its rollouts would be refused now.
        Raises `NotFound` if there is no such session of the owner, `NotReady` if it has ended, `AlreadyExists` if a
        rollout is another turn's, and `NoCapacity` for too many turns, or while the run's quota is used up.
        """
        request = sessions_pb2.AddTurnRequest(
            lease=self._fence,
            session_id=session_id,
            owner=owner,
            request_id=turn.request_id,
            rollout_ids=turn.rollout_ids,
            record=turn.record,
            key=to_proto(key, rollouts_pb2.MeteredKey) if key else None,
            tokens=tokens,
        )
        return from_proto(await self._kept(self._sessions.AddTurn, request), SessionTurn)

    async def read_turns(self, session_id: str, owner: str, after: int = 0) -> TurnPage:
        """Return a session and its turns after a number, about 2 MiB of them at most. Raises `NotFound`."""
        request = sessions_pb2.ReadTurnsRequest(lease=self._fence, session_id=session_id, owner=owner, after=after)
        return from_proto(await self._call(self._sessions.ReadTurns, request), TurnPage)

    async def end_session(self, how: SessionEnd) -> Session:
        """End a session as trajectories of the run or dropped, or return how it ended. Its rollouts are deleted.

        Trajectories that do not fit into one message travel in several. Raises `NotFound`, and `InvalidRequest` naming
        the field of a trajectory.
        """
        *first, last = list(in_batches(how.trajectories, trajectory_size)) or [[]]
        for batch in first:
            part = SessionEnd(session_id=how.session_id, owner=how.owner, trajectories=tuple(batch), more=True)
            session = await self._end(part)
            if session.state is not SessionState.OPEN:
                return session
        return await self._end(msgspec.structs.replace(how, trajectories=tuple(last)))

    async def _end(self, how: SessionEnd) -> Session:
        request = to_proto(how, sessions_pb2.EndSessionRequest)
        request.lease.CopyFrom(self._fence)
        return from_proto(await self._kept(self._sessions.EndSession, request), Session)

    async def sessions(self, owner: str) -> list[Session]:
        """Return the owner's sessions, without records, in the order in which they were opened."""
        request, found = (
            sessions_pb2.ListSessionsRequest(lease=self._fence, owner=owner, page_size=_SESSION_PAGE),
            list[Session](),
        )
        while True:
            answer = await self._call(self._sessions.ListSessions, request)
            found += [from_proto(session, Session) for session in answer.sessions]
            if not answer.next:
                return found
            request.cursor = answer.next
