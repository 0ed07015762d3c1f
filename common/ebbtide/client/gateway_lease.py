"""Makes a gateway's calls for one run: its clients' requests, their tokens, and their sessions.

What the store may still forget is sent again by the lease, as for all leases. A gateway that dies loses nothing that
was acknowledged: another one submits the same rollouts again, under the same ids, and reads on.
"""

from collections.abc import AsyncGenerator

import msgspec

from ebbtide.client.rollout_lease import RolloutLease, in_batches, trajectory_size
from ebbtide.client.service_peer import ServicePeer
from ebbtide.types.key_usage import KeyUsage, MeteredKey
from ebbtide.types.rollout import TokenChunk
from ebbtide.types.run import Run
from ebbtide.types.session import Session, SessionEnd, SessionState, SessionTurn, TurnPage
from ebbtide.v1 import rollouts_pb2, runs_pb2, sessions_pb2
from ebbtide.v1.runs_pb2_grpc import RunsStub
from ebbtide.v1.sessions_pb2_grpc import SessionsStub
from ebbtide.wire.record_conversion import from_proto, to_proto

#: Sessions per page of a list.
_PAGE = 500


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
            sessions_pb2.ListSessionsRequest(lease=self._fence, owner=owner, page_size=_PAGE),
            list[Session](),
        )
        while True:
            answer = await self._call(self._sessions.ListSessions, request)
            found += [from_proto(session, Session) for session in answer.sessions]
            if not answer.next:
                return found
            request.cursor = answer.next
