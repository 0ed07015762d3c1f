"""Serves `ebbtide.v1.Sessions`: gateways' sessions, their turns and verdicts; deletes requests after their time."""
# ruff: noqa: N802, ARG002 - gRPC names the methods and hands each a context

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Final, TypeAlias

import grpc
import msgspec

from ebbtide import telemetry
from ebbtide.coordinator.api.calls import (
    CoordinatorParts,
    ListPage,
    check_cursor,
    check_lease,
    check_number,
    check_reason,
    check_trajectory,
    unconfirmed,
)
from ebbtide.coordinator.api.key_accounts import KeyAccounts
from ebbtide.coordinator.attempt_transitions import changing
from ebbtide.coordinator.state.notifier import notified_or_late
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.errors import InvalidRequest, NotFound, NotReady, StoreUnavailable
from ebbtide.rpc.fair_limiter import stream_turn
from ebbtide.types.ids import check_id
from ebbtide.types.run import LeaseRef, is_gateway
from ebbtide.types.session import (
    MAX_COMPLETIONS,
    MAX_SESSION_RECORD,
    MAX_TURN_RECORD,
    MeteredKey,
    Session,
    SessionEnd,
    SessionState,
    SessionTurn,
    TurnPage,
    UnverifiedSession,
)
from ebbtide.v1 import runs_pb2, sessions_pb2, sessions_pb2_grpc
from ebbtide.wire import from_proto, to_proto

_NEEDS_GATEWAY: Final = "only a gateway's lease allows this; claim the run as gateway"


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
                async with changing(run):
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


class SessionService:
    """Has no state of its own. All methods raise `StoreUnavailable`, `LeaseSuperseded`, and `NotFound` for runs and
    sessions that are not here, or of another owner.
    """

    def __init__(self, parts: CoordinatorParts, retention: RequestRetention) -> None:
        self._state, self._store, self._notifier = parts.state, parts.store, parts.notifier
        self._recovery, self._writes, self._retention = parts.recovery, parts.writes, retention
        self._accounts = KeyAccounts(parts.store)

    async def open(self, lease: LeaseRef, session: Session) -> Session:
        """Open a session, or return the owner's. Raises `NotReady` if it was forgotten, `NoCapacity`."""
        _check_writer(lease)
        _check_session(session.session_id, session.owner)
        check_id(session.group_id, field="group_id")
        _check_size(session.record, MAX_SESSION_RECORD)
        run = await self._recovery.live(lease.run_id)
        self._retention.note(run.run_id, lease)
        return self._told(await self._store.sessions.open(lease, session, quota_bytes=run.spec.quota_bytes))

    async def add_turn(
        self,
        lease: LeaseRef,
        session_id: str,
        owner: str,
        turn: SessionTurn,
        key: MeteredKey | None = None,
        tokens: int = 0,
    ) -> SessionTurn:
        """Add a turn, or return that of the same request. `key`, `tokens`: the client's key, if it has limits, and what
        the turn may come to. Raises `NotReady` after the session's end, `NoCapacity`, `RateLimited`, `BudgetSpent`, and
        `AlreadyExists` for a rollout of another turn, or one that was submitted before.
        """
        _check_writer(lease)
        _check_session(session_id, owner)
        _check_turn(turn)
        run = await self._recovery.live(lease.run_id)
        if key is not None:
            await self._accounts.check_turn(lease, key, session_id, turn, tokens)
        with unconfirmed(self._state, NotFound, NotReady):
            return await self._store.sessions.add_turn(lease, session_id, owner, turn, quota_bytes=run.spec.quota_bytes)

    async def read_turns(self, lease: LeaseRef, session_id: str, owner: str, after: int) -> TurnPage:
        """A page of the turns after a number."""
        check_lease(lease, gateways=True)
        check_id(session_id, field="session_id")
        _check_reader(lease, owner)
        await self._recovery.live(lease.run_id)
        with unconfirmed(self._state, NotFound):
            page = await self._store.sessions.read_turns(lease, session_id, owner, after)
        return msgspec.structs.replace(page, session=self._told(page.session))

    async def end(self, lease: LeaseRef, how: SessionEnd) -> Session:
        """End a session as trajectories or dropped, or return how it ended. Its rollouts stop, and are deleted. While
        more trajectories follow, it stays open; raises `NoCapacity` if the quota does not hold them.
        """
        _check_writer(lease)
        _check_session(how.session_id, how.owner)
        _check_end(how)
        run = await self._recovery.live(lease.run_id)
        return await self._writes.carry_out(changing(run), lambda: self._end(run, lease, how))

    async def _end(self, run: RunState, lease: LeaseRef, how: SessionEnd) -> Session:
        with unconfirmed(self._state, NotFound, InvalidRequest):
            done = await self._store.sessions.end(lease, how, quota_bytes=run.spec.quota_bytes)
        if done.session.state is not SessionState.OPEN:
            self._retention.forget(run, done.ended)
            self._state.episode_over(run, how.session_id)
            self._notifier.notify("trajectories", run.run_id)
            self._notifier.notify("unverified", run.run_id)
        return self._told(done.session)

    async def unverified(self, run_id: str, cursor: str) -> AsyncIterator[UnverifiedSession]:
        """Pieces of the sessions after `cursor` that wait for their verdicts, then of new ones, until the run ends."""
        await self._recovery.live(check_id(run_id, field="run_id"))
        topic = ("unverified", run_id)
        while run_id in self._state.runs:
            with self._notifier.listening(*topic) as notified:
                async with stream_turn():
                    pieces = await self._store.sessions.unverified(run_id, cursor)
                if not pieces:
                    await notified_or_late(notified)
            for piece in pieces:
                yield piece
                cursor = piece.cursor or cursor

    async def verdict(self, lease: LeaseRef, session_id: str, reward: float | None, drop_reason: str) -> Session:
        """End a session that waits for its verdict as trajectories with a reward, or dropped; or return it as it is."""
        check_lease(lease)
        check_id(session_id, field="session_id")
        if (reward is None) is not bool(check_reason(drop_reason, field="drop_reason")):
            raise InvalidRequest("give either a reward or a drop_reason", field="reward")
        if reward is not None and not math.isfinite(reward):
            raise InvalidRequest("must be finite", field="reward")
        run = await self._recovery.live(lease.run_id)

        async def write() -> Session:
            with unconfirmed(self._state, NotFound):
                return await self._store.sessions.verdict(lease, session_id, reward, drop_reason)

        session = await self._writes.carry_out(changing(run), write)
        self._notifier.notify("trajectories", run.run_id)
        return self._told(session)

    async def list(self, lease: LeaseRef, owner: str, cursor: str) -> AsyncGenerator[tuple[str, Session], None]:
        """The owner's sessions behind `cursor`, each with its own cursor, in the order in which they were opened. Those
        of all owners for a trainer or a driver that names none. They come without records.
        """
        check_lease(lease, gateways=True)
        _check_reader(lease, owner)
        behind = check_number(cursor, 0.0)
        await self._recovery.live(lease.run_id)
        while True:
            found, behind = await self._store.sessions.page(lease, owner, behind)
            for number, session in found:
                yield str(number), self._told(session)
            if not behind:
                return

    def _told(self, session: Session) -> Session:
        waits = session.state in (SessionState.OPEN, SessionState.VERIFYING)
        lasts_s = self._retention.idle_s if waits else self._retention.kept_s
        return msgspec.structs.replace(session, ends_in_s=max(0.0, lasts_s - session.idle_s))


def _check_writer(lease: LeaseRef) -> None:
    check_lease(lease, gateways=True)
    if not is_gateway(lease.role):
        raise InvalidRequest(_NEEDS_GATEWAY, field="lease.role")


def _check_reader(lease: LeaseRef, owner: str) -> None:
    if owner or is_gateway(lease.role):
        check_id(owner, field="owner")


def _check_session(session_id: str, owner: str) -> None:
    check_id(session_id, field="session_id")
    check_id(owner, field="owner")


def _check_size(record: bytes, most: int) -> None:
    if len(record) > most:
        raise InvalidRequest(f"{len(record)} bytes are more than {most}", field="record")


def _check_turn(turn: SessionTurn) -> None:
    check_id(turn.request_id, field="request_id")
    if len(turn.rollout_ids) > MAX_COMPLETIONS:
        raise InvalidRequest(f"at most {MAX_COMPLETIONS} for one turn", field="rollout_ids")
    for index, rollout_id in enumerate(turn.rollout_ids):
        check_id(rollout_id, field=f"rollout_ids[{index}]")
        if rollout_id in turn.rollout_ids[:index]:
            raise InvalidRequest(f"names {rollout_id} twice", field=f"rollout_ids[{index}]")
    _check_size(turn.record, MAX_TURN_RECORD)


def _check_verifier(how: SessionEnd) -> None:
    if how.verifier:
        check_id(how.verifier, field="verifier")
    if len(how.data) > MAX_SESSION_RECORD:
        raise InvalidRequest(f"{len(how.data)} bytes are more than {MAX_SESSION_RECORD}", field="data")
    for field, wrong in (
        ("data", how.data and not how.verifier),
        ("verifier", how.verifier and (how.drop_reason or how.more)),
    ):
        if wrong:
            raise InvalidRequest("is for the last trajectories that a verifier rewards; leave it out", field=field)


def _check_end(how: SessionEnd) -> None:
    check_reason(how.drop_reason, field="drop_reason")
    _check_size(how.record, MAX_SESSION_RECORD)
    if bool(how.drop_reason) is bool(how.trajectories):
        raise InvalidRequest("give either trajectories or a drop_reason", field="drop_reason")
    if how.more and how.record:
        raise InvalidRequest("give it with the last trajectories", field="record")
    _check_verifier(how)
    seen = set[str]()
    for index, one in enumerate(how.trajectories):
        field = f"trajectories[{index}]"
        for name in ("episode_id", "group_id"):
            check_id(getattr(one, name), field=f"{field}.{name}")
        own = one.episode_id == how.session_id or one.episode_id.startswith(f"{how.session_id}.")
        if not own or one.episode_id in seen:
            text = f"must be {how.session_id}, or begin with it and a dot, and differ from those before"
            raise InvalidRequest(text, field=f"{field}.episode_id")
        if one.rollouts < 1:
            raise InvalidRequest("must count for at least one rollout", field=f"{field}.rollouts")
        check_trajectory(one, field)
        seen.add(one.episode_id)


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
