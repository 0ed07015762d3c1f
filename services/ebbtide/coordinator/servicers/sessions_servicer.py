"""Serves `ebbtide.v1.Sessions`."""
# ruff: noqa: N802, ARG002 - gRPC names the methods and hands each a context

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc

from ebbtide.coordinator.api.request_checks import check_cursor
from ebbtide.coordinator.api.session_service import SessionService
from ebbtide.coordinator.servicers.list_page import ListPage
from ebbtide.types.key_usage import MeteredKey
from ebbtide.types.run import LeaseRef
from ebbtide.types.session import Session, SessionEnd, SessionTurn
from ebbtide.v1 import runs_pb2, sessions_pb2, sessions_pb2_grpc
from ebbtide.wire.record_conversion import from_proto, to_proto

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

SERVICE = "ebbtide.v1.Sessions"


class SessionsServicer(sessions_pb2_grpc.SessionsServicer):
    def __init__(self, sessions: SessionService) -> None:
        self._sessions = sessions

    async def OpenSession(self, request: sessions_pb2.OpenSessionRequest, context: Context) -> sessions_pb2.Session:
        lease = _lease(request.lease)
        asked = Session(
            session_id=request.session_id,
            run_id=lease.run_id,
            owner=request.owner,
            group_id=request.group_id or request.session_id,
            record=request.record,
        )
        return to_proto(await self._sessions.open(lease, asked), sessions_pb2.Session)

    async def AddTurn(self, request: sessions_pb2.AddTurnRequest, context: Context) -> sessions_pb2.Turn:
        turn = from_proto(request, SessionTurn)
        key = from_proto(request.key, MeteredKey, field="key") if request.HasField("key") else None
        added = await self._sessions.add_turn(
            _lease(request.lease), request.session_id, request.owner, turn, key, request.tokens
        )
        return to_proto(added, sessions_pb2.Turn)

    async def ReadTurns(self, request: sessions_pb2.ReadTurnsRequest, context: Context) -> sessions_pb2.TurnPage:
        lease = _lease(request.lease)
        page = await self._sessions.read_turns(lease, request.session_id, request.owner, request.after)
        return to_proto(page, sessions_pb2.TurnPage)

    async def EndSession(self, request: sessions_pb2.EndSessionRequest, context: Context) -> sessions_pb2.Session:
        how = from_proto(request, SessionEnd)
        return to_proto(await self._sessions.end(_lease(request.lease), how), sessions_pb2.Session)

    async def WatchUnverified(
        self, request: sessions_pb2.WatchUnverifiedRequest, context: Context
    ) -> AsyncIterator[sessions_pb2.UnverifiedSession]:
        async for piece in self._sessions.unverified(request.run_id, check_cursor(request.cursor)):
            yield to_proto(piece, sessions_pb2.UnverifiedSession)

    async def PostVerdict(self, request: sessions_pb2.PostVerdictRequest, context: Context) -> sessions_pb2.Session:
        reward = request.reward if request.HasField("reward") else None
        ended = await self._sessions.verdict(_lease(request.lease), request.session_id, reward, request.drop_reason)
        return to_proto(ended, sessions_pb2.Session)

    async def ListSessions(
        self, request: sessions_pb2.ListSessionsRequest, context: Context
    ) -> sessions_pb2.ListSessionsResponse:
        page = ListPage(sessions_pb2.Session, request.page_size)
        async with aclosing(self._sessions.list(_lease(request.lease), request.owner, request.cursor)) as sessions:
            async for cursor, session in sessions:
                if not page.add(cursor, session):
                    break
        return sessions_pb2.ListSessionsResponse(sessions=page.messages, next=page.next)


def _lease(message: runs_pb2.LeaseRef) -> LeaseRef:
    return from_proto(message, LeaseRef, field="lease")
