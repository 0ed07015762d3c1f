"""Answers what clients ask of their sessions: which there are, what was sampled in them, and how they end.

Traces may be long. So they are shaped in a thread, each turn and branch by itself: the event loop gets its turn in
between.
"""

import asyncio
import math
from collections.abc import Callable
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta, Struct

from ebbtide.errors import InvalidRequest, NotFound
from ebbtide.gateway.dialects.dialect import logprobs_of, version_spans
from ebbtide.gateway.http.route import AppState, JsonCall
from ebbtide.gateway.sessions.ending import end_dropped, end_for_verdict, end_with_reward
from ebbtide.gateway.sessions.live import in_thread
from ebbtide.gateway.sessions.trace import BranchTrace, CompletionTrace, SessionTrace, TurnTrace, trace_page
from ebbtide.gateway.sessions.turn_player import SessionPlayer
from ebbtide.gateway.sessions.turns import names_of, unpack_settings
from ebbtide.types.ids import MAX_CLIENT_ID, check_client_id, check_id, check_session_name, new_fence
from ebbtide.types.parse import parse
from ebbtide.types.session import MAX_SESSION_RECORD, Session, SessionState

T = TypeVar("T")
#: Sessions of one page. Each is read by itself, as lists hold no records.
_PAGE: Final = 100
_AT_ONCE: Final = 16
#: Turns of a page of a trace: without a wish, and at most.
_TURNS: Final = 100
_MOST_TURNS: Final = 1000
_DIGITS: Final = 9
ClientId = Annotated[str, Meta(max_length=MAX_CLIENT_ID)]


class OpenBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    session_id: ClientId = ""
    group_id: ClientId = ""


class RewardBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    reward: float


class EndBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    reward: float | None = None
    drop_reason: str = ""
    verifier: str = ""
    data: dict[str, Any] = {}


class SessionRoutes:
    """The work of these routes, for keys that do more than play. A session of another name's keys is not there."""

    def __init__(self, state: AppState) -> None:
        self._state = state

    async def open(self, call: JsonCall) -> dict[str, Any]:
        """POST /v1/sessions: opens a session, or answers as it is."""
        asked = parse(OpenBody, call.body)
        name = check_session_name(asked.session_id or new_fence(), field="session_id")
        sessions = await self._sessions(call)
        async with sessions.opened(name, check_client_id(asked.group_id, field="group_id")) as live:
            assert live.session is not None  # noqa: S101 - it is open
            return session_head(live.session)

    async def listed(self, call: JsonCall) -> dict[str, Any]:
        """GET /v1/sessions: those of the key's name, newest first, from the place `offset` on; or those after session
        `after`, which stay the same when further ones are opened. Raises `NotFound` once that one is forgotten.
        """
        sessions = await self._sessions(call)
        offset = _number(call, "offset", 0, "a number of sessions to leave out")
        found = (await sessions.lease.sessions(call.key.sessions_of))[::-1]
        if after := call.query.get("after", ""):
            last = sessions.stored_id(check_session_name(after, field="after"))
            places = (place for place, one in enumerate(found, 1) if one.session_id == last)
            if not (offset := next(places, 0)):
                raise NotFound(f"after: no session {after[:100]!r} of this key is here; list from the start")
        page, slots = found[offset : offset + _PAGE], asyncio.Semaphore(_AT_ONCE)

        async def head(session_id: str, turns: int) -> dict[str, Any]:
            async with slots:
                return session_head((await sessions.lease.read_turns(session_id, call.key.sessions_of, turns)).session)

        heads = await asyncio.gather(*(head(one.session_id, one.turns) for one in page))
        return {"object": "list", "data": heads, "total": len(found), "has_more": offset + _PAGE < len(found)}

    async def trace(self, call: JsonCall) -> dict[str, Any]:
        """GET /v1/sessions/{id}: ids, logprobs, masks and versions, by turn and by branch, for a page of turns after
        the turn `after`, up to `until`; of an ended one, its end.
        """
        head, trace = await self._traced(call, trace_body)
        return head | (trace or {"turns": None, "branches": None, "until": None, "has_more": False})

    async def completions(self, call: JsonCall) -> dict[str, Any]:
        """GET /v1/sessions/{id}/completions: each completion with its whole prompt, by the same pages."""
        head, page = await self._traced(call, completions_body)
        if page is None:
            raise NotFound("the session has ended, and its tokens are deleted here; read them before")
        return {"object": "list", "session": head, **page}

    async def reward(self, call: JsonCall) -> dict[str, Any]:
        """POST /v1/sessions/{id}/reward: ends the session as trajectories."""
        return await self._rewarded(call, parse(RewardBody, call.body).reward)

    async def end(self, call: JsonCall) -> dict[str, Any]:
        """POST /v1/sessions/{id}/end: with a reward, a verifier that gives it, or a reason why it is dropped."""
        asked = parse(EndBody, call.body)
        if sum((asked.reward is not None, bool(asked.drop_reason), bool(asked.verifier))) > 1:
            raise InvalidRequest("give a reward, a drop_reason or a verifier, and not several", field="reward")
        if asked.data and (asked.reward is not None or asked.drop_reason):
            raise InvalidRequest("is for a verifier, and none is asked; leave it out", field="data")
        if asked.reward is not None:
            return await self._rewarded(call, asked.reward)
        if not asked.drop_reason:
            return await self._verified(call, asked)
        reason = check_id(asked.drop_reason, field="drop_reason")
        return session_head(await end_dropped(await self._sessions(call), _name(call), reason))

    async def _rewarded(self, call: JsonCall, reward: float) -> dict[str, Any]:
        if not math.isfinite(reward):
            raise InvalidRequest("must be finite", field="reward")
        return session_head(await end_with_reward(await self._sessions(call), _name(call), reward))

    async def _verified(self, call: JsonCall, asked: EndBody) -> dict[str, Any]:
        data = msgspec.json.encode(asked.data) if asked.data else b""
        if len(data) > MAX_SESSION_RECORD:
            raise InvalidRequest(f"has {len(data)} bytes, more than {MAX_SESSION_RECORD}", field="data")
        sessions = await self._sessions(call)
        return session_head(await end_for_verdict(sessions, _name(call), asked.verifier, data))

    async def _traced(self, call: JsonCall, shape: Callable[[SessionTrace], T]) -> tuple[dict[str, Any], T | None]:
        after = _number(call, "after", 0, "a turn's number")
        most = _number(call, "limit", _TURNS, f"a number of turns, 1 to {_MOST_TURNS}")
        if not 0 < most <= _MOST_TURNS:
            raise InvalidRequest(f"must be a number of turns, 1 to {_MOST_TURNS}", field="limit")
        until = _number(call, "until", 0, "a turn's number")
        sessions = await self._sessions(call)
        async with sessions.found(_name(call)) as (live, session):
            if session.state is not SessionState.OPEN:
                return session_head(session), None
            return session_head(session), await in_thread(lambda: shape(trace_page(live.book, after, most, until)))

    async def _sessions(self, call: JsonCall) -> SessionPlayer:
        call.key.check_ends()
        served = await self._state.directory.find(call.key, call.query.get("model", ""))
        return self._state.sessions_of(served.lease, served.player, call.key)


def _number(call: JsonCall, field: str, default: int, what: str) -> int:
    text = call.query.get(field, str(default))
    if not text.isdecimal() or len(text) > _DIGITS:
        raise InvalidRequest(f"must be {what}", field=field)
    return int(text)


def _name(call: JsonCall) -> str:
    return check_session_name(call.path["session_id"], field="session_id")


_encoder: Final = msgspec.json.Encoder()


def session_head(session: Session) -> dict[str, Any]:
    """What is known of a session without its tokens. Times are seconds."""
    names = names_of(session)
    return {
        "id": names.session,
        "object": "session",
        "run_id": session.run_id,
        "group_id": names.group or None,
        "state": session.state.name.lower(),
        "reward": names.reward if session.reward is None else session.reward,
        "verifier": session.verifier or None,
        "drop_reason": session.drop_reason or None,
        "turn_count": session.turns,
        "age_s": session.age_s,
        "idle_s": session.idle_s,
        "ends_in_s": session.ends_in_s,
    }


def trace_body(trace: SessionTrace) -> dict[str, Any]:
    """All tokens of these turns."""
    return {
        "turns": [_encoded(turn_body(turn)) for turn in trace.turns],
        "branches": [_encoded(_branch(branch)) for branch in trace.branches],
        "unmatched_tokens": trace.unmatched,
        "unknown_answers": trace.unknown,
        "until": trace.until,
        "has_more": trace.more,
    }


def turn_body(turn: TurnTrace) -> dict[str, Any]:
    """One turn. `prompt_mask` is 1 where the prompt repeats a token as it was sampled."""
    record = turn.turn.record
    return {
        "number": turn.turn.number,
        "parent": turn.parent and {"turn": turn.parent.turn, "completion": turn.parent.completion},
        "matched_by": record.origin.name.lower(),
        "prompt_token_ids": turn.prompt_ids.tolist(),
        "prompt_mask": turn.sampled.tolist(),
        "unmatched_tokens": record.unmatched,
        "unknown_answers": record.unknown,
        "sampling": unpack_settings(record.settings).distribution(),
        "completions": [_completion(one) for one in turn.completions],
    }


def completions_body(trace: SessionTrace) -> dict[str, Any]:
    """All completions in the order of their turns, each with its whole prompt."""
    data = [
        _encoded(
            {
                "turn": turn.turn.number,
                "prompt_token_ids": turn.prompt_ids.tolist(),
                "prompt_mask": turn.sampled.tolist(),
                **_completion(one),
            }
        )
        for turn in trace.turns
        for one in turn.completions
    ]
    return {"data": data, "until": trace.until, "has_more": trace.more}


def _encoded(body: dict[str, Any]) -> msgspec.Raw:
    return msgspec.Raw(_encoder.encode(body))


def _completion(one: CompletionTrace) -> dict[str, Any]:
    return {
        "id": one.rollout_id,
        "token_ids": one.tokens["id"].tolist(),
        "logprobs": logprobs_of(one.tokens),
        "weight_versions": version_spans(one.tokens),
        "delivered": one.delivered,
    }


def _branch(branch: BranchTrace) -> dict[str, Any]:
    return {
        "turns": list(branch.turns),
        "prompt_token_ids": branch.prompt_ids.tolist(),
        "token_ids": branch.tokens["id"].tolist(),
        "loss_mask": branch.loss_mask.tolist(),
        "sampled_mask": branch.sampled.tolist(),
        "logprobs": logprobs_of(branch.tokens),
        "weight_versions": branch.tokens["version"].tolist(),
    }
