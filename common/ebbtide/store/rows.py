"""What the store tells the coordinator about rollouts; smaller than what callers submit."""

from enum import StrEnum

from msgspec import Struct

from ebbtide.types.rollout import RolloutRequest, SubmitOutcome


class State(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"


class Accepted(Struct, frozen=True):
    """One submitted rollout: `place` in line for an accepted one, `state` for a known one."""

    outcome: SubmitOutcome
    place: int = 0
    state: State | None = None


class Open(Struct, frozen=True, kw_only=True):
    """A queued or running rollout as read back at a start; `request` comes without its prompt, of `prompt_len`
    tokens.
    """

    place: int
    request: RolloutRequest
    prompt_len: int
    state: State
    attempt_id: str
    stored: int


class Placed(Struct, frozen=True):
    """A rollout given to a worker: the whole request, and the tokens stored so far."""

    request: RolloutRequest
    partial: bytes
    attempts: int


class Held(Struct, frozen=True):
    """A role's holder, and for how long it has the lease unless it renews it."""

    holder: str
    rest_s: float


class Requeued(Struct, frozen=True):
    """A rollout whose attempt ended: `barren` attempts in a row stored nothing, and why they ended."""

    stored: int
    barren: int
    evidence: str
