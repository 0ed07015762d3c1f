"""Defines the records that the coordinator exchanges with the store about rollouts and attempts."""

from collections.abc import Sequence
from enum import IntEnum, StrEnum

from msgspec import Struct

from ebbtide.types.end_cause import EndCause
from ebbtide.types.rollout import RolloutRequest, SubmitOutcome


class RolloutState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"


class AttemptFate(IntEnum):
    """The store's answer about an attempt that its worker continues."""

    OVER = 0
    RUNS = 1
    UNKNOWN = 2  # the store does not know the rollout


class AdoptedAttempt(Struct, frozen=True):
    fate: AttemptFate
    stored: int


class AccountCharge(Struct, frozen=True):
    """What a submit charges to the account of a client's key. Without an owner: nothing."""

    owner: str = ""
    request_debt: int = 0  # thousandths that are added
    token_debt: int = 0
    tokens_per_minute: int = 0  # that pay off the second debt; 0: the key has no such rate, and no such debt
    held: Sequence[tuple[int, int]] = ()  # of each rollout: tokens of its prompt, and the most that it may come to


class AcceptedRollout(Struct, frozen=True):
    """The store's answer to one submitted rollout."""

    outcome: SubmitOutcome
    place: int = 0  # in the queue, of an accepted one
    state: RolloutState | None = None  # of a known one


class OpenRollout(Struct, frozen=True, kw_only=True):
    """A queued or running rollout, as a starting coordinator reads it."""

    place: int
    request: RolloutRequest  # without its prompt
    prompt_len: int  # tokens
    state: RolloutState
    attempt_id: str
    stored: int  # tokens
    barren: int = 0  # see `RequeuedRollout`
    avoid: frozenset[str] = frozenset()
    step: int = 0  # that it was submitted for, if known


class PlacedRollout(Struct, frozen=True):
    """A rollout that was given to a worker."""

    request: RolloutRequest  # with its prompt
    partial: bytes  # the tokens stored so far
    attempts: int


class LeaseHolder(Struct, frozen=True):
    """The holder of a role's lease."""

    holder: str
    rest_s: float  # until the lease ends, unless it is renewed


class EndedAttempt(Struct, frozen=True):
    """An attempt to end."""

    rollout_id: str
    attempt_id: str
    tokens: int = 0  # at most so many tokens are lost with its worker


class EndReason(Struct, frozen=True):
    """Why attempts end."""

    cause: EndCause
    text: str  # the same for people, in spans and dead letters
    blame: bool = False  # the rollout itself may be the reason
    noticed_s: float | None = None  # seconds from the worker's last sign of life to its loss, if it was lost

    @property
    def avoid(self) -> bool:
        """Whether the rollout must not return to that worker."""
        return self.cause is EndCause.WORKER_SUSPECTED

    @property
    def moved(self) -> bool:
        """Whether the coordinator moved the attempt."""
        return self.cause is EndCause.MOVED


class RequeuedRollout(Struct, frozen=True):
    """A rollout that went back into the queue after its attempt ended."""

    stored: int  # tokens
    barren: int  # the number of its latest attempts in a row that stored no token
    evidence: str  # why those attempts ended
    avoid: frozenset[str] = frozenset()  # workers that went silent with it
