"""Defines the records of the append stream: tokens sent to the store, and their acknowledgements."""

from typing import NamedTuple

from ebbtide.types.fleet import AppendStatus, AttemptRef
from ebbtide.types.rollout import FinishReason


class AppendDelta(NamedTuple):
    """Packed tokens of one attempt, from `offset` on."""

    ref: AttemptRef
    offset: int
    tokens: bytes
    finish: FinishReason | None = None  # on the attempt's last delta


class AppendAck(NamedTuple):
    """The store's answer to one delta."""

    attempt_id: str
    status: AppendStatus
    stored: int  # tokens of the attempt that the store keeps
    finished: bool  # the store keeps the attempt's finish, too
    message: int = 0  # the sender's number of the delta's message
