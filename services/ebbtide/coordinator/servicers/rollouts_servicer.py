"""Serves `ebbtide.v1.Rollouts`."""
# ruff: noqa: N802, ARG002 - gRPC names the methods and hands each a context

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any, Final, TypeAlias

import grpc

from ebbtide.coordinator.api.request_checks import check_cursor
from ebbtide.coordinator.api.rollout_service import RolloutService
from ebbtide.coordinator.servicers.record_lists import records_from_proto
from ebbtide.types.key_usage import MeteredKey
from ebbtide.types.rollout import Episode, FinishedRollout, RolloutRequest, SubmitOrder, TrajectoryOutcome
from ebbtide.types.run import LeaseRef
from ebbtide.v1 import rollouts_pb2, rollouts_pb2_grpc, runs_pb2
from ebbtide.wire.record_conversion import from_proto, to_proto

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
