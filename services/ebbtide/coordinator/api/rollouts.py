"""Serves `ebbtide.v1.Rollouts`: rollouts, episodes and trajectories."""
# ruff: noqa: N802, ARG002 - gRPC names the methods and hands each a context

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, Final, TypeAlias

import grpc
import numpy as np
from msgspec.structs import replace

from ebbtide.coordinator import metrics
from ebbtide.coordinator.api.calls import (
    AT_ONCE,
    CoordinatorParts,
    check_batch,
    check_cursor,
    check_lease,
    check_reason,
    check_trajectory,
    paced,
    records_from_proto,
    unconfirmed,
)
from ebbtide.coordinator.api.key_accounts import KeyAccounts
from ebbtide.coordinator.api.sessions import RequestRetention
from ebbtide.coordinator.attempt_transitions import changing
from ebbtide.coordinator.fleet.worker_registry import SCORERS
from ebbtide.coordinator.state.attempt_records import new_entry, place_of_group
from ebbtide.coordinator.state.notifier import follow, follow_pages
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.errors import InvalidRequest, NotFound, NotReady
from ebbtide.rpc.fair_limiter import stream_turn
from ebbtide.store.records import AccountCharge, RolloutState, WritesRefused
from ebbtide.types.fleet import EngineInfo
from ebbtide.types.ids import check_id
from ebbtide.types.rollout import (
    MAX_CLIENT_DIGEST,
    MAX_NUMBER,
    MAX_UNSETTLED,
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
from ebbtide.types.run import LeaseRef, check_sampling, is_gateway
from ebbtide.types.session import KeyUsage, MeteredKey
from ebbtide.types.tokens import TOKEN_BYTES, check_records, unpack_ids
from ebbtide.v1 import rollouts_pb2, rollouts_pb2_grpc, runs_pb2
from ebbtide.wire import from_proto, to_proto


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
        _check_order(order)
        if len(requests) > AT_ONCE:
            await self._fleet.give_way()
        await _check_rollouts(requests, self._fleet.engines(), run, lease)
        if is_gateway(lease.role):
            await self._check_able(run, requests)
        self._retention.note(run.run_id, lease)
        return await self._writes.carry_out(changing(run), lambda: self._submit(run, lease, requests, order, key))

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
                run.mirror.mark_stale()  # its worker continues it
            elif row.outcome is SubmitOutcome.ACCEPTED:
                group = place_of_group(run, request, row.place)
                length = len(request.prompt_ids) // 4
                now, step = self._state.clock(), order.step or 0
                run.admit(new_entry(request, place=row.place, group=group, length=length, now=now, step=step))
                metrics.requests.inc(request.kind is RolloutKind.REQUEST)
            elif row.state is RolloutState.QUEUED and request.rollout_id not in run.queue:
                run.mirror.mark_stale()  # taken by a call whose answer was lost
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
        with unconfirmed(self._state, NotFound, InvalidRequest):
            async with stream_turn():
                return await self._store.trajectories.tokens(run_id, rollout_id, offset)

    async def acknowledge(self, lease: LeaseRef, rollout_ids: Sequence[str], drop_reason: str) -> None:
        """End finished rollouts as trained, or dropped with a reason, and delete them."""
        check_lease(lease)
        self._check_ids(rollout_ids)
        drop_reason = check_reason(drop_reason, field="drop_reason")
        with unconfirmed(self._state, InvalidRequest):
            acknowledge = self._store.rollouts.acknowledge
            episodes = await acknowledge(lease, rollout_ids, drop_reason, trusted=self._state.doubtful)
        if (run := self._state.runs.get(lease.run_id)) is not None:
            for episode_id in episodes:
                run.episodes.acknowledged(episode_id)

    async def cancel(self, lease: LeaseRef, rollout_ids: Sequence[str], reason: str) -> None:
        """Drop rollouts in any state; workers stop generating them. Requests finish with the tokens they have."""
        run = await self._recovery.live(check_lease(lease, gateways=True).run_id)
        self._check_ids(rollout_ids)
        reason = check_reason(reason, field="reason") or DropReason.CANCELLED
        await self._writes.carry_out(changing(run), lambda: self._cancel(run, lease, rollout_ids, reason))

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
        await self._writes.carry_out(changing(run), lambda: self._complete_all(run, lease, episodes))

    async def _complete_all(self, run: RunState, lease: LeaseRef, episodes: Sequence[Episode]) -> None:
        calls = [self._complete(run, lease, index, episode) for index, episode in enumerate(episodes)]
        found = await asyncio.gather(*calls, return_exceptions=True)
        self._notifier.notify("trajectories", run.run_id)
        errors = [error for error in found if error is not None]
        # An unknown outcome is told before refusals by which nothing was done: see `changing`.
        refused = min(errors, key=lambda error: isinstance(error, WritesRefused), default=None)
        try:
            if refused is not None:
                raise refused
        finally:
            del found, errors, refused  # the error refers to this frame: together they would be a cycle

    async def _complete(self, run: RunState, lease: LeaseRef, index: int, episode: Episode) -> None:
        try:
            with unconfirmed(self._state, InvalidRequest):
                ran = await self._store.trajectories.complete(lease, episode, trusted=self._state.doubtful)
        except InvalidRequest as error:
            raise InvalidRequest(error.text, field=f"episodes[{index}].{error.field}") from None
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


#: A rollout's prompt and tokens travel in one message when it is resumed or finished; messages are at most 4 MiB.
_MAX_BYTES: Final = (4 << 20) - (128 << 10)


async def _check_rollouts(
    requests: Sequence[RolloutRequest], engines: Sequence[EngineInfo], run: RunState, lease: LeaseRef
) -> None:
    """Refuse rollouts that no attached engine could generate, no message could carry, or the lease is not for. What a
    worker's context held that left may come: it waits for another.
    """
    spec = run.spec
    check_batch(requests, field="rollouts")
    _check_kinds(requests, lease)
    context = spec.max_model_len or max(run.context, *(engine.max_model_len for engine in engines), 0)
    vocabulary = max((engine.vocab_size for engine in engines), default=0)
    total = index = 0
    async for page in paced(requests):
        for request in page:
            _check_rollout(request, f"rollouts[{index}]", context, vocabulary)
            total, index = total + len(request.prompt_ids), index + 1
    if total > spec.quota_bytes:
        raise InvalidRequest(
            f"{total} bytes of prompts are more than the run's quota_bytes ({spec.quota_bytes}); send fewer at a time",
            field="rollouts",
        )


def _check_kinds(requests: Sequence[RolloutRequest], lease: LeaseRef) -> None:
    gateway = is_gateway(lease.role)
    for index, request in enumerate(requests):
        if (request.kind is RolloutKind.REQUEST) is not gateway:
            text = "a gateway's lease takes requests only" if gateway else "only a gateway's lease takes requests"
            raise InvalidRequest(text, field=f"rollouts[{index}].kind")
        if request.sampling.without_logprobs and not gateway:
            text = "the trainer needs the logprobs of what it trains on; leave it out"
            raise InvalidRequest(text, field=f"rollouts[{index}].sampling.without_logprobs")


def _check_rollout(request: RolloutRequest, field: str, context: int, vocabulary: int) -> None:
    for name in ("rollout_id", "group_id", "episode_id"):
        check_id(getattr(request, name), field=f"{field}.{name}")
    check_sampling(request.sampling, field=f"{field}.sampling")
    if request.max_version and request.min_version > request.max_version:
        raise InvalidRequest(f"must be at most max_version ({request.max_version})", field=f"{field}.min_version")
    if len(request.client_digest) > MAX_CLIENT_DIGEST:
        raise InvalidRequest(f"must be at most {MAX_CLIENT_DIGEST} bytes", field=f"{field}.client_digest")
    _check_prompt(request, field, context, vocabulary)
    if request.prompt_logprobs is not None:
        _check_scoring(request, request.prompt_logprobs, field)


def _check_scoring(request: RolloutRequest, alternatives: int, field: str) -> None:
    if request.kind is not RolloutKind.REQUEST:
        raise InvalidRequest("only requests are scored; leave it out", field=f"{field}.prompt_logprobs")
    if request.sampling.max_tokens != 1:
        raise InvalidRequest("must be 1 where a prompt is scored", field=f"{field}.sampling.max_tokens")
    check_records(len(request.prompt_ids) // 4, alternatives, field=f"{field}.prompt_logprobs")


def _check_order(order: SubmitOrder) -> SubmitOrder:
    for name in ("sequence", "settled", "step", "first_step"):
        if (getattr(order, name) or 0) >= MAX_NUMBER:
            raise InvalidRequest(f"must be below {MAX_NUMBER}", field=name)
    if order.settled > order.sequence:
        raise InvalidRequest(f"must be at most sequence ({order.sequence})", field="settled")
    if order.sequence - order.settled >= MAX_UNSETTLED:
        text = f"more than {MAX_UNSETTLED} submits are not settled; wait for some, or leave sequence and settled out"
        raise InvalidRequest(text, field="settled")
    if order.step is not None and order.step < order.first_step:
        raise InvalidRequest(f"must be at least first_step ({order.first_step})", field="step")
    return order


def _check_prompt(request: RolloutRequest, field: str, context: int, vocabulary: int) -> None:
    ids = unpack_ids(request.prompt_ids, field=f"{field}.prompt_ids")
    if not len(ids):
        raise InvalidRequest("must hold at least one token", field=f"{field}.prompt_ids")
    if context and len(ids) >= context:
        raise InvalidRequest(
            f"{len(ids)} tokens leave no room for a response in the run's context, its max_model_len or the longest "
            f"attached ({context})",
            field=f"{field}.prompt_ids",
        )
    if vocabulary and (largest := int(np.max(ids))) >= vocabulary:
        raise InvalidRequest(
            f"token id {largest} is beyond the engines' vocabulary ({vocabulary}); is it another model's tokenizer?",
            field=f"{field}.prompt_ids",
        )
    longest = min(request.sampling.max_tokens, context or request.sampling.max_tokens)
    if len(request.prompt_ids) + longest * TOKEN_BYTES > _MAX_BYTES:
        raise InvalidRequest("prompt and response would not fit into one message", field=f"{field}.sampling.max_tokens")


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
