"""Defines sessions of gateways' clients, their turns, and what a client's key may use of one run."""

from enum import IntEnum
from typing import Annotated, Final

from msgspec import Meta, Struct

from ebbtide.types.ids import MAX_ID
from ebbtide.types.rollout import Trajectory

#: Lua counts exactly up to 2^53, also thousandths of it.
Limit = Annotated[int, Meta(ge=0, le=1 << 42)]


class KeyLimits(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Bounds of one key; 0: none. A completion's tokens are those of its response; its prompt counts once a request."""

    requests_per_minute: Limit = 0
    tokens_per_minute: Limit = 0
    tokens: Limit = 0  # in all
    tokens_per_day: Limit = 0  # from midnight to midnight, UTC
    requests_at_once: Limit = 0


class MeteredKey(Struct, frozen=True, kw_only=True):
    """A key whose requests are counted. Keys of one owner have one account in each run."""

    owner: Annotated[str, Meta(min_length=1, max_length=MAX_ID)]
    limits: KeyLimits = KeyLimits()


class KeyUsage(Struct, frozen=True, kw_only=True):
    """What one owner's keys with limits have used of a run."""

    owner: str
    requests: int = 0
    requests_open: int = 0
    tokens: int = 0  # of requests that have ended
    tokens_today: int = 0  # of `tokens`, since midnight, UTC
    tokens_reserved: int = 0  # that open requests may come to, at most


class KeyBalance(Struct, frozen=True, kw_only=True):
    """The account of one owner in one run, as it is stored. Debts are thousandths; negative ones are none."""

    spent: int = 0  # tokens of requests that have ended
    today: int = 0  # of them since midnight
    reserved: int = 0  # tokens that open requests may come to
    open: int = 0  # requests
    request_debt: int = 0
    token_debt: int = 0
    idle_ms: int = 0  # since the debts were written


#: Bytes of a session's record, of a turn's, and of a page of turns: half of a message's 4 MiB.
MAX_SESSION_RECORD: Final = 64 << 10
MAX_TURN_RECORD: Final = 2 << 20
TURN_PAGE_BYTES: Final = 2 << 20
MAX_COMPLETIONS: Final = 128  # of one turn
#: Turns of one session, and rollouts of all of them: the store ends a session in one script.
MAX_TURNS: Final = 4096
MAX_SESSION_ROLLOUTS: Final = 4096


class SessionState(IntEnum):
    OPEN = 1
    COMPLETED = 2  # as trajectories
    DROPPED = 3
    VERIFYING = 4  # it has ended, and waits for the verdict of its verifier


class Session(Struct, frozen=True, kw_only=True):
    """An episode that a gateway's client plays. Times are seconds."""

    session_id: str
    run_id: str
    owner: str
    group_id: str  # of its trajectories
    turns: int = 0
    state: SessionState = SessionState.OPEN
    age_s: float = 0.0
    idle_s: float = 0.0  # since its last turn was added, a rollout of it finished, or it ended
    ends_in_s: float = 0.0  # then it is dropped unless it goes on; an ended one is forgotten then
    record: bytes = b""  # the gateway's own
    drop_reason: str = ""
    verifier: str = ""  # that gives its reward
    reward: float | None = None  # that its verifier gave


class SessionTurn(Struct, frozen=True, kw_only=True):
    """One request of a session. `record` is the gateway's own."""

    request_id: str
    rollout_ids: tuple[str, ...] = ()
    record: bytes = b""
    number: int = 0  # in the session, from 1 on
    age_s: float = 0.0


class TurnPage(Struct, frozen=True, kw_only=True):
    session: Session
    turns: tuple[SessionTurn, ...] = ()
    more: bool = False  # ask again after the last one


class SessionEnd(Struct, frozen=True, kw_only=True):
    """How a session ends: as trajectories, or with a reason why it is dropped."""

    session_id: str
    owner: str
    trajectories: Annotated[tuple[Trajectory, ...], Meta(max_length=MAX_TURNS)] = ()
    drop_reason: str = ""
    record: bytes = b""  # takes the place of the session's, unless it is empty
    more: bool = False  # further trajectories follow: until the last call the session stays open
    verifier: str = ""  # gives the reward of the trajectories
    data: bytes = b""  # for the verifier: a JSON object


class UnverifiedSession(Struct, frozen=True, kw_only=True):
    """A session that waits for its verdict, or a piece of it. The reward of its trajectories is not known yet."""

    session_id: str
    verifier: str
    data: bytes = b""
    trajectories: tuple[Trajectory, ...] = ()
    piece: int = 0
    cursor: str = ""  # with the last piece alone
