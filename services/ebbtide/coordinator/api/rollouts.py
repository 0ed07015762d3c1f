"""Serves `ebbtide.v1.Rollouts`: rollouts, episodes and trajectories; deletes requests after their time."""
# ruff: noqa: N802, ARG002 - gRPC names the methods and hands each a context

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing
from typing import Any, Final, TypeAlias

import grpc
from msgspec.structs import replace

from ebbtide import telemetry
from ebbtide.coordinator import metrics
from ebbtide.coordinator.api.key_accounts import KeyAccounts
from ebbtide.coordinator.api.lists import AT_ONCE, records_from_proto
from ebbtide.coordinator.api.request_checks import (
    check_batch,
    check_cursor,
    check_lease,
    check_order,
    check_reason,
    check_rollouts,
    check_trajectory,
    in_doubt,
)
from ebbtide.coordinator.coordinator_parts import CoordinatorParts
from ebbtide.coordinator.fleet.worker_registry import SCORERS
from ebbtide.coordinator.state.attempt_records import new_entry, place_of_group
from ebbtide.coordinator.state.notifier import follow, follow_pages
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.errors import EbbtideError, InvalidRequest, NotFound, NotReady, StoreUnavailable
from ebbtide.rpc.caller_turns import stream_turn
from ebbtide.store.rollout_rows import AccountCharge, RolloutState
from ebbtide.store.unexpected_data import WritesRefused
from ebbtide.types.ids import check_id
from ebbtide.types.key_usage import KeyUsage, MeteredKey
from ebbtide.types.rollout import (
    DropReason,
    Episode,
    FinishedRollout,
    RolloutKind,
    RolloutRequest,
    SubmitOrder,
    SubmitOutcome,
    TokenChunk,
    Trajectory,
    TrajectoryOutcome,
)
from ebbtide.types.run import LeaseRef, is_gateway
from ebbtide.v1 import rollouts_pb2, rollouts_pb2_grpc, runs_pb2
from ebbtide.wire.record_conversion import from_proto, to_proto

log = telemetry.get_logger(__name__)
#: Longest time between two rounds. What is due takes store memory until then.
_LOOK_S: Final = 5.0
#: Rounds in the shortest of the two times.
_ROUNDS: Final = 4


class RequestRetention:
    """Deletes finished requests and ended sessions after their time, and drops sessions that nobody continues.

    Invariant: the store says what is due, by its own clock, so a restart delays nothing that is due by more than a
    round. `_bare` has the runs that are known to have neither requests nor sessions: these are not asked for. It is
    lost with the process; the next one asks for each run once.
    """

    def __init__(self, parts: CoordinatorParts) -> None:
        self._state, self._store, self._attempts = parts.state, parts.store, parts.attempts
        self._notifier = parts.notifier
        self.kept_s, self.idle_s = parts.settings.request_kept_s, parts.settings.session_idle_s
        self._bare: set[str] = set()

    def note(self, run_id: str, lease: LeaseRef) -> None:
        """Note, before a store call under this lease, that the run may have requests or sessions from now on."""
        if is_gateway(lease.role):
            self._bare.discard(run_id)

    async def expire_for_ever(self) -> None:
        """Look after all runs regularly, and after a store that was away soon."""
        pause_s = min(_LOOK_S, self.kept_s / _ROUNDS, self.idle_s / _ROUNDS)
        while True:
            await asyncio.sleep(pause_s)
            try:
                await self.round()
            except StoreUnavailable as error:
                log.warning("store away", reason=str(error))

    async def round(self) -> None:
        """Delete what is due now, of all runs."""
        live = self._state.at_work(self._state.clock())
        self._bare &= self._state.runs.keys()
        for run in live:
            if run.run_id not in self._bare:
                async with self._attempts.while_it_lives(run):
                    await self._expire(run)

    async def _expire(self, run: RunState) -> None:
        self._bare.add(run.run_id)  # unless a request comes meanwhile
        try:
            left = True
            while left:
                async with run.changing():
                    found = await self._store.sessions.expire(run.run_id, kept_s=self.kept_s, idle_s=self.idle_s)
                    self.forget(run, found.ended)
                left = found.due > 0
        except BaseException:
            self._bare.discard(run.run_id)
            raise
        if found.left:
            self._bare.discard(run.run_id)

    def forget(self, run: RunState, ended: list[tuple[str, str]]) -> None:
        """Stop requests that the store cancelled, as (rollout, attempt or ""), and notify the readers of their tokens.
        Call with the run's lock held.
        """
        self._attempts.over(run, ended)
        for rollout_id, _ in ended:
            self._notifier.notify("tokens", run.run_id, rollout_id)


class RolloutService:
    """Has no state of its own. All methods raise `StoreUnavailable`, `NotFound` and `LeaseSuperseded`."""

    def __init__(self, parts: CoordinatorParts, retention: RequestRetention) -> None:
        self._settings, self._state, self._store, self._notifier = (
            parts.settings,
            parts.state,
            parts.store,
            parts.notifier,
        )
        self._fleet, self._attempts, self._recovery = parts.fleet, parts.attempts, parts.recovery
        self._writes, self._retention, self._readers = parts.writes, retention, parts.readers
        self._accounts = KeyAccounts(parts.store)

    async def submit(
        self, lease: LeaseRef, requests: Sequence[RolloutRequest], order: SubmitOrder, key: MeteredKey | None = None
    ) -> list[SubmitOutcome]:
        """Queue rollouts, all or none. `key`: of the client whose account is charged, if it has limits. Raises
        `InvalidRequest`, `AlreadyExists`, `NoCapacity`, beyond the limits `RateLimited` or `BudgetSpent`, and while no
        attached worker can do what a gateway's requests ask for `NotReady`.
        """
        run = await self._recovery.live(check_lease(lease, gateways=True).run_id)
        check_order(order)
        if len(requests) > AT_ONCE:
            await self._fleet.give_way()
        await check_rollouts(requests, self._fleet.engines(), run, lease)
        if is_gateway(lease.role):
            await self._check_able(run, requests)
        self._retention.note(run.run_id, lease)
        return await self._writes.carry_out(run.changing(), lambda: self._submit(run, lease, requests, order, key))

    async def _check_able(self, run: RunState, requests: Sequence[RolloutRequest]) -> None:
        """Refuse what no worker can do now. Repeats are taken: they may have their tokens already."""
        scored = next((one for one in requests if one.prompt_logprobs is not None), None)
        if scored is not None and self._fleet.cannot_score():
            await self._refuse_new(run, scored, f"no attached worker scores prompts; {SCORERS}, or try again")
        cut = next((one for one in requests if one.sampling.min_p), None)
        if cut is not None and self._fleet.cannot_sample_min_p():
            text = (
                "no attached worker samples with min_p, as those that draft tokens cannot; leave it out, or try again"
            )
            await self._refuse_new(run, cut, text)

    async def _refuse_new(self, run: RunState, request: RolloutRequest, text: str) -> None:
        try:
            await self._store.trajectories.tokens(run.run_id, request.rollout_id, 0)
        except NotFound:
            raise NotReady(text) from None

    async def _submit(
        self,
        run: RunState,
        lease: LeaseRef,
        requests: Sequence[RolloutRequest],
        order: SubmitOrder,
        key: MeteredKey | None,
    ) -> list[SubmitOutcome]:
        charge = await self._accounts.charge(lease, key, requests) if key else AccountCharge()
        accepted = await self._store.rollouts.submit(
            lease,
            requests,
            quota_bytes=run.spec.quota_bytes,
            max_open=self._settings.max_open,
            order=order,
            charge=charge,
        )
        for request, row in zip(requests, accepted, strict=True):
            if request.rollout_id in run.unconfirmed:
                run.mark_stale()  # its worker continues it
            elif row.outcome is SubmitOutcome.ACCEPTED:
                group = place_of_group(run, request, row.place)
                length = len(request.prompt_ids) // 4
                now, step = self._state.clock(), order.step or 0
                run.admit(new_entry(request, place=row.place, group=group, length=length, now=now, step=step))
                metrics.requests.inc(request.kind is RolloutKind.REQUEST)
            elif row.state is RolloutState.QUEUED and request.rollout_id not in run.queue:
                run.mark_stale()  # taken by a call whose answer was lost
        return [row.outcome for row in accepted]

    async def key_usage(self, run_id: str, owner: str) -> list[KeyUsage]:
        """What clients' keys with limits have used of a run; `owner`: of one, "" for all."""
        found = await self._accounts.usage(run_id, owner)
        if run_id in self._state.runs:
            return found
        return [replace(one, requests_open=0, tokens_reserved=0) for one in found]  # they ended with the run

    async def finished(self, run_id: str, cursor: str) -> AsyncGenerator[list[FinishedRollout], None]:
        """Pages of finished rollouts after `cursor`, oldest first, until the run has ended."""
        await self._recovery.live(check_id(run_id, field="run_id"))
        topic = ("finished", run_id)
        pages = follow_pages(
            self._notifier,
            topic,
            lambda last: self._store.trajectories.finished(run_id, last),
            cursor,
            self._over(run_id),
        )
        async with aclosing(pages):
            async for page in pages:
                yield page

    async def tokens(self, run_id: str, rollout_id: str, offset: int) -> AsyncIterator[TokenChunk]:
        """The rollout's tokens from `offset`; the last chunk has the reason. `LeaseSuperseded` when the run ends."""
        check_id(run_id, field="run_id")
        check_id(rollout_id, field="rollout_id")
        with self._readers.reading(run_id, rollout_id) as reader:
            async for chunk in reader.follow(offset, lambda at: self._stored_tokens(run_id, rollout_id, at)):
                yield chunk

    async def _stored_tokens(self, run_id: str, rollout_id: str, offset: int) -> TokenChunk:
        await self._recovery.live(run_id)
        with self._in_doubt(NotFound, InvalidRequest):
            async with stream_turn():
                return await self._store.trajectories.tokens(run_id, rollout_id, offset)

    async def acknowledge(self, lease: LeaseRef, rollout_ids: Sequence[str], drop_reason: str) -> None:
        """End finished rollouts as trained, or dropped with a reason, and delete them."""
        check_lease(lease)
        self._check_ids(rollout_ids)
        drop_reason = check_reason(drop_reason, field="drop_reason")
        with self._in_doubt(InvalidRequest):
            acknowledge = self._store.rollouts.acknowledge
            episodes = await acknowledge(lease, rollout_ids, drop_reason, vouched=self._state.doubtful)
        if (run := self._state.runs.get(lease.run_id)) is not None:
            for episode_id in episodes:
                run.acknowledged(episode_id)

    async def cancel(self, lease: LeaseRef, rollout_ids: Sequence[str], reason: str) -> None:
        """Drop rollouts in any state; workers stop generating them. Requests finish with the tokens they have."""
        run = await self._recovery.live(check_lease(lease, gateways=True).run_id)
        self._check_ids(rollout_ids)
        reason = check_reason(reason, field="reason") or DropReason.CANCELLED
        await self._writes.carry_out(run.changing(), lambda: self._cancel(run, lease, rollout_ids, reason))

    async def _cancel(self, run: RunState, lease: LeaseRef, rollout_ids: Sequence[str], reason: str) -> None:
        ran = await self._store.rollouts.cancel(lease, rollout_ids, reason)
        self._attempts.over(run, ran)
        self._forget(run, rollout_ids)

    async def complete(self, lease: LeaseRef, episodes: Sequence[Episode]) -> None:
        """End episodes, each once. An error names the first refused one; the others are done."""
        run = await self._recovery.live(check_lease(lease).run_id)
        check_batch(episodes, field="episodes")
        for index, episode in enumerate(episodes):
            _check_episode(episode, f"episodes[{index}]")
        await self._writes.carry_out(run.changing(), lambda: self._complete_all(run, lease, episodes))

    async def _complete_all(self, run: RunState, lease: LeaseRef, episodes: Sequence[Episode]) -> None:
        calls = [self._complete(run, lease, index, episode) for index, episode in enumerate(episodes)]
        found = await asyncio.gather(*calls, return_exceptions=True)
        self._notifier.notify("trajectories", run.run_id)
        errors = [error for error in found if error is not None]
        # An unknown outcome is told before refusals by which nothing was done: see `RunState.changing`.
        refused = min(errors, key=lambda error: isinstance(error, WritesRefused), default=None)
        try:
            if refused is not None:
                raise refused
        finally:
            del found, errors, refused  # the error refers to this frame: together they would be a cycle

    async def _complete(self, run: RunState, lease: LeaseRef, index: int, episode: Episode) -> None:
        try:
            with self._in_doubt(InvalidRequest):
                ran = await self._store.trajectories.complete(lease, episode, vouched=self._state.doubtful)
        except InvalidRequest as error:
            text = str(error).removeprefix(f"{error.field}: ")
            raise InvalidRequest(text, field=f"episodes[{index}].{error.field}") from None
        self._attempts.over(run, ran)
        self._forget(run, episode.rollout_ids)
        self._state.episode_over(run, episode.episode_id)

    async def trajectories(self, run_id: str, cursor: str) -> AsyncIterator[Trajectory]:
        """Uncommitted trajectories after `cursor`, in the order of their completion, until the run has ended."""
        await self._recovery.live(check_id(run_id, field="run_id"))
        topic = ("trajectories", run_id)
        async for one in follow(
            self._notifier, topic, lambda last: self._store.trajectories.page(run_id, last), cursor, self._over(run_id)
        ):
            yield one

    async def commit(self, lease: LeaseRef, outcomes: Sequence[TrajectoryOutcome]) -> None:
        """Count trajectories as trained or dropped, and delete them."""
        check_lease(lease, role="trainer")
        check_batch(outcomes, field="outcomes")
        for index, outcome in enumerate(outcomes):
            check_cursor(outcome.cursor, field=f"outcomes[{index}].cursor")
            check_reason(outcome.drop_reason, field=f"outcomes[{index}].drop_reason")
        await self._store.trajectories.commit(lease, outcomes)

    def _in_doubt(self, *refusals: type[EbbtideError]) -> AbstractContextManager[None]:
        return in_doubt(self._state, *refusals)

    def _over(self, run_id: str) -> Callable[[], bool]:
        return lambda: run_id not in self._state.runs

    def _check_ids(self, rollout_ids: Sequence[str]) -> None:
        check_batch(rollout_ids, field="rollout_ids")
        for index, rollout_id in enumerate(rollout_ids):
            check_id(rollout_id, field=f"rollout_ids[{index}]")

    def _forget(self, run: RunState, rollout_ids: Sequence[str]) -> None:
        """Forget rollouts that the store deleted, and notify the readers of their tokens."""
        for rollout_id in rollout_ids:
            run.end(rollout_id)
            self._notifier.notify("tokens", run.run_id, rollout_id)


def _check_episode(episode: Episode, field: str) -> None:
    check_id(episode.episode_id, field=f"{field}.episode_id")
    for number, rollout_id in enumerate(episode.rollout_ids):
        check_id(rollout_id, field=f"{field}.rollout_ids[{number}]")
    check_reason(episode.drop_reason, field=f"{field}.drop_reason")
    trajectory = episode.trajectory
    if trajectory is None:
        return
    if episode.drop_reason:
        raise InvalidRequest("leave it out: a dropped episode has no trajectory", field=f"{field}.trajectory")
    if trajectory.episode_id != episode.episode_id:
        raise InvalidRequest(f"must be the episode's ({episode.episode_id})", field=f"{field}.trajectory.episode_id")
    check_trajectory(trajectory, f"{field}.trajectory")


Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

SERVICE = "ebbtide.v1.Rollouts"
#: Bytes of rollouts that come in one message, unless one has more: a quarter of what a message may have.
_GROUP_BYTES: Final = 1 << 20


class RolloutsServicer(rollouts_pb2_grpc.RolloutsServicer):
    def __init__(self, rollouts: RolloutService) -> None:
        self._rollouts = rollouts

    async def Submit(self, request: rollouts_pb2.SubmitRequest, context: Context) -> rollouts_pb2.SubmitResponse:
        asked = await records_from_proto(request.rollouts, RolloutRequest, field="rollouts")
        key = from_proto(request.key, MeteredKey, field="key") if request.HasField("key") else None
        outcomes = await self._rollouts.submit(_lease(request.lease), asked, from_proto(request, SubmitOrder), key)
        return rollouts_pb2.SubmitResponse(outcomes=[outcome.value for outcome in outcomes])  # type: ignore[misc]

    async def ListKeyUsage(
        self, request: rollouts_pb2.ListKeyUsageRequest, context: Context
    ) -> rollouts_pb2.ListKeyUsageResponse:
        found = await self._rollouts.key_usage(request.run_id, request.owner)
        return rollouts_pb2.ListKeyUsageResponse(usage=[to_proto(one, rollouts_pb2.KeyUsage) for one in found])

    async def WatchFinished(
        self, request: rollouts_pb2.WatchFinishedRequest, context: Context
    ) -> AsyncIterator[rollouts_pb2.FinishedRollout]:
        async with aclosing(self._rollouts.finished(request.run_id, check_cursor(request.cursor))) as pages:
            async for page in pages:
                for message in finished_messages(page, grouped=request.grouped):
                    yield message

    async def StreamTokens(
        self, request: rollouts_pb2.StreamTokensRequest, context: Context
    ) -> AsyncIterator[rollouts_pb2.TokenChunk]:
        async for chunk in self._rollouts.tokens(request.run_id, request.rollout_id, request.offset):
            yield to_proto(chunk, rollouts_pb2.TokenChunk)

    async def Acknowledge(self, request: rollouts_pb2.AcknowledgeRequest, context: Context) -> runs_pb2.Empty:
        await self._rollouts.acknowledge(_lease(request.lease), list(request.rollout_ids), request.drop_reason)
        return runs_pb2.Empty()

    async def Cancel(self, request: rollouts_pb2.CancelRequest, context: Context) -> runs_pb2.Empty:
        await self._rollouts.cancel(_lease(request.lease), list(request.rollout_ids), request.reason)
        return runs_pb2.Empty()

    async def CompleteEpisodes(self, request: rollouts_pb2.CompleteEpisodesRequest, context: Context) -> runs_pb2.Empty:
        episodes = await records_from_proto(request.episodes, Episode, field="episodes")
        await self._rollouts.complete(_lease(request.lease), episodes)
        return runs_pb2.Empty()

    async def WatchTrajectories(
        self, request: rollouts_pb2.WatchTrajectoriesRequest, context: Context
    ) -> AsyncIterator[rollouts_pb2.Trajectory]:
        async for one in self._rollouts.trajectories(request.run_id, check_cursor(request.cursor)):
            yield to_proto(one, rollouts_pb2.Trajectory)

    async def CommitTrajectories(
        self, request: rollouts_pb2.CommitTrajectoriesRequest, context: Context
    ) -> runs_pb2.Empty:
        outcomes = await records_from_proto(request.outcomes, TrajectoryOutcome, field="outcomes")
        await self._rollouts.commit(_lease(request.lease), outcomes)
        return runs_pb2.Empty()


def finished_messages(page: list[FinishedRollout], *, grouped: bool) -> Iterator[rollouts_pb2.FinishedRollout]:
    """The messages of a page: one for each, or for as many as may come together."""
    first, size = None, 0
    for one in page:
        message = to_proto(one, rollouts_pb2.FinishedRollout)
        size += message.ByteSize()
        if first is not None and grouped and size <= _GROUP_BYTES:
            first.others.append(message)
            continue
        if first is not None:
            yield first
        first, size = message, message.ByteSize()
    if first is not None:
        yield first


def _lease(message: runs_pb2.LeaseRef) -> LeaseRef:
    return from_proto(message, LeaseRef, field="lease")
