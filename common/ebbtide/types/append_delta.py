"""Tokens on their way into the store, and what became of them."""

from typing import NamedTuple

from ebbtide.types.fleet import AppendStatus, AttemptRef
from ebbtide.types.rollout import FinishReason


class AppendDelta(NamedTuple):
    """Tokens of one attempt from `offset` on, packed; `finish` on its last."""

    ref: AttemptRef
    offset: int
    tokens: bytes
    finish: FinishReason | None = None


class AppendAck(NamedTuple):
    """`stored` tokens are kept; `finished`: so is the end. `message`: the sender's number of the delta's message."""

    attempt_id: str
    status: AppendStatus
    stored: int
    finished: bool
    message: int = 0
