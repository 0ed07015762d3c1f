"""Stores sessions of gateways' clients, their turns and how they end, and reads the accounts of clients' keys.

Each change of a session is one script, safe to repeat. The scripts of submits charge accounts, those of requests' ends
settle them.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from ebbtide.errors import AlreadyExists, InvalidRequest, NoCapacity, NotFound, NotReady
from ebbtide.store.connection import StoreRefused, Topic
from ebbtide.store.records import pack, text_pairs, unpack
from ebbtide.store.scripts import run_key
from ebbtide.types.rollout import Trajectory
from ebbtide.types.run import LeaseRef
from ebbtide.types.session import (
    MAX_SESSION_ROLLOUTS,
    MAX_TURNS,
    TURN_PAGE_BYTES,
    KeyBalance,
    KeyUsage,
    Session,
    SessionEnd,
    SessionState,
    SessionTurn,
    TurnPage,
    UnverifiedSession,
)

_KNOWN, _NEW_REQUEST = 0, 2
_DAY_S: Final = 86400
#: What `_usage` tells of an account.
_TOLD: Final = ("requests", "open", "spent", "today", "day", "reserved")


class ReadAccount(NamedTuple):
    """An account, and which rollouts are new to it."""

    balance: KeyBalance
    until_midnight_s: float
    accounts: int  # of the run, this one included if it is there
    exists: bool
    new: list[bool]  # of each rollout: it was not submitted before
    opens: list[bool]  # of each rollout: no other of its request is open


class AccountTopic(Topic):
    async def read(
        self, lease: LeaseRef, owner: str, rollouts: Sequence[tuple[str, str]], session_id: str = ""
    ) -> ReadAccount:
        """The account of an owner, for rollouts as (id, group). `session_id`: of which their groups are turns, perhaps
        stored ones; a stored turn's rollouts are not new. "": they are no turns.
        """
        flat = [part for rollout in rollouts for part in rollout]
        found = [int(one) for one in await self._leased("read_account", lease, owner, session_id, *flat)]
        spent, today, reserved, opened, request_debt, token_debt, idle_ms, left_s, exists, accounts, *states = found
        balance = KeyBalance(
            spent=spent,
            today=today,
            reserved=reserved,
            open=opened,
            request_debt=request_debt,
            token_debt=token_debt,
            idle_ms=idle_ms,
        )
        new, opens = [one != _KNOWN for one in states], [one == _NEW_REQUEST for one in states]
        return ReadAccount(balance, float(left_s), accounts, bool(exists), new, opens)

    async def usage(self, run_id: str, owner: str = "") -> list[KeyUsage]:
        """What keys have used of a run, by their owners. `owner`: "" for all."""
        key = run_key(run_id, "ACCOUNTS")
        fields = await self._of_owner(key, owner) if owner else await self._of_all(key)
        day = int((await self._link.call("TIME"))[0]) // _DAY_S
        return [_usage(one, found, day) for one, found in sorted(fields.items())]

    async def _of_owner(self, key: str, owner: str) -> dict[str, dict[str, int]]:
        values = await self._link.call("HMGET", key, *(f"{owner}:{name}" for name in _TOLD))
        found = {name: int(value) for name, value in zip(_TOLD, values, strict=True) if value is not None}
        return {owner: found} if found else {}

    async def _of_all(self, key: str) -> dict[str, dict[str, int]]:
        fields = defaultdict[str, dict[str, int]](dict)
        for name, value in text_pairs(await self._link.call("HGETALL", key)):
            whose, _, what = name.partition(":")
            if what and whose:
                fields[whose][what] = int(value)
        return fields


def _usage(owner: str, found: dict[str, int], day: int) -> KeyUsage:
    return KeyUsage(
        owner=owner,
        requests=found.get("requests", 0),
        requests_open=found.get("open", 0),
        tokens=found.get("spent", 0),
        tokens_today=found.get("today", 0) if found.get("day", 0) == day else 0,
        tokens_reserved=found.get("reserved", 0),
    )


#: Sessions that one script looks at for a list.
_LOOKED_AT: Final = 128
#: What is due that one script deletes: others wait for it.
_EXPIRED_AT_ONCE: Final = 64
#: Sessions end, and requests expire, at about this pace.
_RETRY_AFTER_S: Final = 5.0
_Row = list[bytes | int]


class EndedSession(NamedTuple):
    session: Session
    ended: list[tuple[str, str]]  # (rollout, attempt or "") of those that were open


class ExpiredRequests(NamedTuple):
    due: int  # requests and sessions; 0: nothing is due any more
    left: bool  # the run still has some, open ones included
    ended: list[tuple[str, str]]  # as of `EndedSession`


class SessionTopic(Topic):
    """All calls under a lease also raise `NotFound` for a session that is not here, or of another owner. `ends_in_s` of
    the sessions that they return is not set.
    """

    async def open(self, lease: LeaseRef, session: Session, *, quota_bytes: int) -> Session:
        """Open a session, or return the one that is here. Raises `NotReady` (it was forgotten), `NoCapacity`."""
        about = session.session_id, session.owner, session.group_id, session.record
        try:
            return _session(lease.run_id, await self._leased("open_session", lease, *about, quota_bytes))
        except StoreRefused as refused:
            raise _refusal(refused, session.session_id, quota_bytes) from None

    async def add_turn(
        self, lease: LeaseRef, session_id: str, owner: str, turn: SessionTurn, *, quota_bytes: int
    ) -> SessionTurn:
        """Add a turn, or return the one of this request. Raises `NotReady` (the session has ended), `NoCapacity`, and
        `AlreadyExists` for a rollout of another turn, or one that was submitted before.
        """
        about = session_id, owner, turn.request_id, pack(turn), quota_bytes, MAX_TURNS, MAX_SESSION_ROLLOUTS
        try:
            return _turn(*await self._leased("add_turn", lease, *about, *turn.rollout_ids))
        except StoreRefused as refused:
            if refused.code == "ROLLOUT":
                rollout = turn.rollout_ids[int(refused.detail)]
                raise AlreadyExists(f"rollout {rollout} is of another turn; choose another id") from None
            if refused.code == "KNOWN":
                rollout = turn.rollout_ids[int(refused.detail)]
                raise AlreadyExists(f"rollout {rollout} was submitted before its turn; choose another id") from None
            raise _refusal(refused, session_id, quota_bytes) from None

    async def read_turns(self, lease: LeaseRef, session_id: str, owner: str, after: int) -> TurnPage:
        """A page of the turns after a number. `owner`: "" for any."""
        try:
            found = await self._leased("read_turns", lease, session_id, owner, after, TURN_PAGE_BYTES)
        except StoreRefused as refused:
            raise _refusal(refused, session_id) from None
        row, more, *turns = found
        return TurnPage(
            session=_session(lease.run_id, row), turns=tuple(_turn(*turn) for turn in turns), more=bool(more)
        )

    async def end(self, lease: LeaseRef, how: SessionEnd, *, quota_bytes: int) -> EndedSession:
        """End a session, or return how it ended. If more trajectories follow, it stays open, and these are kept. Raises
        `InvalidRequest` if all of them count for more rollouts than it has, and `NoCapacity` if more follow and the
        quota does not hold these.
        """
        branches = [part for one in how.trajectories for part in (one.episode_id, pack(one), one.rollouts)]
        about = (
            how.session_id,
            how.owner,
            how.drop_reason,
            how.record,
            int(how.more),
            quota_bytes,
            how.verifier,
            how.data,
        )
        try:
            row, *ended = await self._leased("end_session", lease, *about, *branches)
        except StoreRefused as refused:
            if refused.code == "COUNTED":
                text = f"count for more rollouts than the session has ({refused.detail})"
                raise InvalidRequest(text, field="trajectories") from None
            raise _refusal(refused, how.session_id, quota_bytes) from None
        return EndedSession(_session(lease.run_id, row), text_pairs(ended))

    async def unverified(self, run_id: str, cursor: str) -> list[UnverifiedSession]:
        """The first session after `cursor` that waits for its verdict, in pieces that fit into messages."""
        found = await self._run("read_unverified", run_id, cursor or "0-0")
        if not found:
            return []
        entry, session, verifier, data, *rows = found
        pieces = _pieces([trajectory for trajectory, _ in map(_branch, rows)])
        return [
            UnverifiedSession(
                session_id=session.decode(),
                verifier=verifier.decode(),
                data=data,
                trajectories=tuple(piece),
                piece=number,
                cursor=entry.decode() if number == len(pieces) - 1 else "",
            )
            for number, piece in enumerate(pieces)
        ]

    async def verdict(self, lease: LeaseRef, session_id: str, reward: float | None, drop_reason: str) -> Session:
        """End a session that waits for its verdict, or return it as it is."""
        try:
            rows = await self._leased("read_branches", lease, session_id) if reward is not None else []
            branches = [part for row in rows for part in _rewarded(row, reward or 0.0)]
            told = "" if reward is None else repr(reward)
            row = await self._leased("verdict", lease, session_id, told, drop_reason, *branches)
        except StoreRefused as refused:
            raise _refusal(refused, session_id) from None
        return _session(lease.run_id, row)

    async def page(self, lease: LeaseRef, owner: str, cursor: float) -> tuple[list[tuple[int, Session]], int]:
        """Sessions behind a number, each with its own, and the number to look behind next; 0: there are no more."""
        *rows, last = await self._leased("list_sessions", lease, owner, cursor, _LOOKED_AT)
        return [(number, _session(lease.run_id, row)) for number, row in rows], int(last)

    async def expire(self, run_id: str, *, kept_s: float, idle_s: float) -> ExpiredRequests:
        """Delete some requests that finished `kept_s` ago, drop sessions unused for `idle_s`, and forget sessions that
        ended `kept_s` ago. Late repeats of what was deleted are recognised for `kept_s` more.
        """
        limits = round(kept_s * 1000), round(idle_s * 1000), _EXPIRED_AT_ONCE
        due, left, *ended = await self._write("expire", run_id, *limits)
        return ExpiredRequests(int(due), bool(left), text_pairs(ended))


def _session(run_id: str, row: _Row) -> Session:
    session, owner, group, state, reason, turns, age_ms, idle_ms, record, verifier, reward = row
    texts = (bytes(part).decode() for part in (session, owner, group))
    session_id, owner_id, group_id = texts
    return Session(
        session_id=session_id,
        run_id=run_id,
        owner=owner_id,
        group_id=group_id,
        turns=int(turns),
        state=SessionState[bytes(state).decode().upper()],
        age_s=max(0, int(age_ms)) / 1000,
        idle_s=max(0, int(idle_ms)) / 1000,
        record=bytes(record),
        drop_reason=bytes(reason).decode(),
        verifier=bytes(verifier).decode(),
        reward=float(bytes(reward)) if reward else None,
    )


def _branch(row: bytes) -> tuple[Trajectory, int]:
    """A stored branch, and the rollouts that it counts for."""
    counted, _, packed = row.partition(b" ")
    return unpack(packed, Trajectory), int(counted)


def _rewarded(row: bytes, reward: float) -> tuple[int, bytes]:
    trajectory, counted = _branch(row)
    return counted, pack(msgspec.structs.replace(trajectory, reward=reward))


def _pieces(trajectories: list[Trajectory]) -> list[list[Trajectory]]:
    """At least one piece. Each but a single trajectory has at most half of a message."""
    pieces, size = [list[Trajectory]()], 0
    for one in sorted(trajectories, key=lambda one: one.episode_id):
        stops = sum(64 + 5 * len(response.sampling.stop_token_ids) for response in one.responses)
        bytes_of = len(one.prompt_ids) + len(one.tokens) + len(one.loss_mask) + stops
        if pieces[-1] and size + bytes_of > TURN_PAGE_BYTES:
            pieces.append([])
            size = 0
        pieces[-1].append(one)
        size += bytes_of
    return pieces


def _turn(number: int, age_ms: int, packed: bytes) -> SessionTurn:
    return msgspec.structs.replace(unpack(packed, SessionTurn), number=number, age_s=max(0, int(age_ms)) / 1000)


def _refusal(refused: StoreRefused, session_id: str, quota_bytes: int = 0) -> Exception:
    match refused.code:
        case "SESSION":
            return NotFound(f"there is no session {session_id}; open it, or it has ended and was forgotten")
        case "OVER" if refused.detail:
            return NotReady(f"session {session_id} has ended ({refused.detail.strip()}); open another one")
        case "OVER":
            return NotReady(f"session {session_id} has ended, and was forgotten; choose another id")
        case "TURNS":
            text = f"session {session_id} has {refused.detail} turns, and takes no more; end it, and open another one"
            return NoCapacity(text, retry_after_s=_RETRY_AFTER_S)
        case "QUOTA":
            text = f"its run uses {refused.detail} of its quota_bytes ({quota_bytes}), of which gateways may use three "
            text += "quarters; end sessions, or wait"
            return NoCapacity(f"session {session_id}: {text}", retry_after_s=_RETRY_AFTER_S)
    return refused
