"""Defines the installer's states and the transitions between them. Pure: the installer carries out what they demand.

Invariant: an install holds generation in exactly the `HOLDING` states, and a target is pulled or installed in exactly
the `BUSY` states. No transition changes both. Every working state leads back to `IDLE` or `RESTING`.
"""

from enum import Enum, auto
from typing import Final, NamedTuple


class InstallState(Enum):
    """What the installer is doing."""

    #: It waits for a target.
    IDLE = auto()
    #: It pulls the version into the mirror and locks it there; generation goes on.
    PULLING = auto()
    #: Running attempts forbid the version; the mirror is not locked.
    WAITING_FOR_ATTEMPTS = auto()
    #: The version is locked in the mirror; the lender of the device decides when the engine may be touched.
    WAITING_FOR_LENDER = auto()
    #: The engine restarts for the version's architecture.
    CHANGING_ENGINE = auto()
    #: The engine changes to the version.
    INSTALLING = auto()
    #: The install has ended; the coordinator has no report yet.
    REPORTING = auto()
    #: The engine gave its weights up; targets wait.
    RESTING = auto()
    #: It pulls the version that the engine comes back with.
    RESTORING = auto()
    #: The engine loads the weights that it gave up.
    RELOADING = auto()


class InstallEvent(Enum):
    """What changes the installer's state."""

    BEGIN = auto()  # there is a target to bring in
    LOCKED = auto()  # the version is locked in the mirror, and no attempt forbids it
    FORBIDDEN = auto()  # an attempt forbids the version
    ADMITTED = auto()  # no attempt forbids the version any more
    CHANGE = auto()  # the version needs another engine
    INSTALL = auto()  # the engine may be touched
    DONE = auto()  # the engine has the version, or it refused it
    END = auto()  # the target, or the restore, needs nothing more
    REST = auto()  # the engine gives its weights up
    RESTORE = auto()  # the engine needs weights again
    NOT_NOW = auto()  # the device may not be touched


class Action(Enum):
    """What a transition demands."""

    HOLD = auto()  # begin to hold generation
    RELEASE = auto()  # end the hold
    TELL = auto()  # tell watchers that the worker became busy, or free
    GIVE_BACK = auto()  # free what finished runs used
    WAKE = auto()  # look at the target again


class Transition(NamedTuple):
    """The state that an event leads to, and the actions then, in this order."""

    state: InstallState
    actions: tuple[Action, ...]


_S, _E = InstallState, InstallEvent
#: No attempt is admitted.
HOLDING: Final = frozenset({_S.CHANGING_ENGINE, _S.INSTALLING, _S.RELOADING})
#: The coordinator sees the worker as installing.
BUSY: Final = frozenset(
    {_S.PULLING, _S.WAITING_FOR_ATTEMPTS, _S.WAITING_FOR_LENDER, _S.CHANGING_ENGINE, _S.INSTALLING, _S.REPORTING}
)
#: A target may be dropped: the engine is untouched.
DROPPABLE: Final = frozenset({_S.PULLING, _S.WAITING_FOR_ATTEMPTS, _S.WAITING_FOR_LENDER})
#: Only the version that the engine serves is in use.
SETTLED: Final = frozenset({_S.IDLE, _S.RESTING})

_NEXT: Final = {
    (_S.IDLE, _E.BEGIN): _S.PULLING,
    (_S.PULLING, _E.LOCKED): _S.WAITING_FOR_LENDER,
    (_S.PULLING, _E.FORBIDDEN): _S.WAITING_FOR_ATTEMPTS,
    (_S.PULLING, _E.END): _S.IDLE,
    (_S.WAITING_FOR_ATTEMPTS, _E.ADMITTED): _S.PULLING,  # other workers may have moved the mirror on meanwhile
    (_S.WAITING_FOR_ATTEMPTS, _E.END): _S.IDLE,
    (_S.WAITING_FOR_LENDER, _E.FORBIDDEN): _S.WAITING_FOR_ATTEMPTS,
    (_S.WAITING_FOR_LENDER, _E.CHANGE): _S.CHANGING_ENGINE,
    (_S.WAITING_FOR_LENDER, _E.INSTALL): _S.INSTALLING,
    (_S.WAITING_FOR_LENDER, _E.END): _S.IDLE,
    (_S.CHANGING_ENGINE, _E.INSTALL): _S.INSTALLING,
    (_S.CHANGING_ENGINE, _E.DONE): _S.REPORTING,
    (_S.INSTALLING, _E.DONE): _S.REPORTING,
    (_S.REPORTING, _E.END): _S.IDLE,
    (_S.IDLE, _E.REST): _S.RESTING,
    (_S.IDLE, _E.RESTORE): _S.RESTORING,  # again, after a failure
    (_S.RESTING, _E.RESTORE): _S.RESTORING,
    (_S.RESTORING, _E.INSTALL): _S.RELOADING,
    (_S.RESTORING, _E.NOT_NOW): _S.RESTING,
    (_S.RESTORING, _E.END): _S.IDLE,
    (_S.RELOADING, _E.DONE): _S.RESTORING,
}


def transition(state: InstallState, event: InstallEvent) -> Transition:
    """Raises `ValueError` for an event that is impossible in this state."""
    if (after := _NEXT.get((state, event))) is None:
        raise ValueError(f"{event.name} is impossible in {state.name}")
    actions = []
    if (state in HOLDING) != (after in HOLDING):
        actions.append(Action.HOLD if after in HOLDING else Action.RELEASE)
    if (state in BUSY) != (after in BUSY):
        actions.append(Action.TELL)
    if after in SETTLED and state not in SETTLED:
        actions.append(Action.GIVE_BACK)
    if state is _S.RESTORING and after is _S.IDLE:
        actions.append(Action.WAKE)
    return Transition(after, tuple(actions))
