"""What the store tells the coordinator about rollouts; smaller than what callers submit."""

from enum import IntEnum, StrEnum

from msgspec import Struct

from ebbtide.types.end_cause import EndCause
from ebbtide.types.rollout import RolloutRequest, SubmitOutcome


class RolloutState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"


class AttemptFate(IntEnum):
    """What the store says of an attempt that its worker goes on with."""

    OVER = 0
    RUNS = 1
    UNKNOWN = 2  # the rollout itself is not known


class AdoptedAttempt(Struct, frozen=True):
    fate: AttemptFate
    stored: int


class AcceptedRollout(Struct, frozen=True):
    """One submitted rollout: `place` in line for an accepted one, `state` for a known one."""

    outcome: SubmitOutcome
    place: int = 0
    state: RolloutState | None = None


class OpenRollout(Struct, frozen=True, kw_only=True):
    """A queued or running rollout as read back at a start; `request` comes without its prompt, of `prompt_len`
    tokens. `barren`, `avoid`: see `RequeuedRollout`.
    """

    place: int
    request: RolloutRequest
    prompt_len: int
    state: RolloutState
    attempt_id: str
    stored: int
    barren: int = 0
    avoid: frozenset[str] = frozenset()


class PlacedRollout(Struct, frozen=True):
    """A rollout given to a worker: the whole request, and the tokens stored so far."""

    request: RolloutRequest
    partial: bytes
    attempts: int


class LeaseHolder(Struct, frozen=True):
    """A role's holder, and for how long it has the lease unless it renews it."""

    holder: str
    rest_s: float


class EndedAttempt(Struct, frozen=True):
    """An attempt to end: with its worker went at most `tokens` that nobody has."""

    rollout_id: str
    attempt_id: str
    tokens: int = 0


class EndReason(Struct, frozen=True):
    """Why attempts end."""

    cause: EndCause
    text: str  # the same for people, in spans and dead letters
    blame: bool = False  # the rollout itself may be why
    noticed_s: float | None = None  # seconds from the worker's last sign of life to its loss, if it was lost

    @property
    def avoid(self) -> bool:
        """Whether the rollout is not to come back to that worker."""
        return self.cause is EndCause.WORKER_SUSPECTED

    @property
    def moved(self) -> bool:
        """Whether the coordinator took it away."""
        return self.cause is EndCause.MOVED


class RequeuedRollout(Struct, frozen=True):
    """A rollout whose attempt ended: `barren` attempts in a row stored nothing, and why they ended; `avoid`: workers
    that went silent with it.
    """

    stored: int
    barren: int
    evidence: str
    avoid: frozenset[str] = frozenset()
