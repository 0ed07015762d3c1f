"""Defines the installer's states and the transitions between them. Pure: the installer carries out what they demand.

Invariant: generation is held by an install in `HOLDING` and in no other state, and a pull or an install of a wish goes
on in `BUSY` and in no other state. No transition changes both. Every working state leads back to `IDLE` or `RESTING`.
"""

from enum import Enum, auto
from typing import Final, NamedTuple


class InstallState(Enum):
    """What the installer is doing."""

    #: It waits for a wish.
    IDLE = auto()
    #: It pulls the version into the mirror and locks it there; generation goes on.
    PULLING = auto()
    #: Attempts are generated that may not go on under the version; the mirror is not locked.
    WAITING_FOR_ATTEMPTS = auto()
    #: The version is locked in the mirror; the lender of the device decides when the engine may be touched.
    WAITING_FOR_LENDER = auto()
    #: The engine starts anew for the version's architecture.
    CHANGING_ENGINE = auto()
    #: The engine changes to the version.
    INSTALLING = auto()
    #: The install has ended, and the coordinator is not told yet.
    REPORTING = auto()
    #: The engine gave its weights up; wishes wait.
    RESTING = auto()
    #: The version to come back with is pulled.
    RESTORING = auto()
    #: The engine loads the weights that it gave up.
    RELOADING = auto()


class InstallEvent(Enum):
    """What changes the installer's state."""

    BEGIN = auto()  # a wish is to be fulfilled
    LOCKED = auto()  # the version is in the mirror, locked, and no attempt forbids it
    FORBIDDEN = auto()  # an attempt forbids the version
    ADMITTED = auto()  # no attempt forbids the version any more
    CHANGE = auto()  # the version needs another engine
    INSTALL = auto()  # the engine may be touched
    DONE = auto()  # the engine has the version, or it refused it
    END = auto()  # nothing more is to be done for the wish, or for what was given up
    REST = auto()  # the engine is to give its weights up
    RESTORE = auto()  # the engine is to have weights again
    NOT_NOW = auto()  # the device may not be touched


class Deed(Enum):
    """What a transition demands."""

    HOLD = auto()  # begin to hold generation
    RELEASE = auto()  # end the hold
    TELL = auto()  # tell those who watch that the worker is busy, or no longer
    GIVE_BACK = auto()  # free what is left of runs that are over
    WAKE = auto()  # look at the wish again


class Transition(NamedTuple):
    """The state that an event leads to, and what is to be done then, in this order."""

    state: InstallState
    deeds: tuple[Deed, ...]


_S, _E = InstallState, InstallEvent
#: No attempt is admitted.
HOLDING: Final = frozenset({_S.CHANGING_ENGINE, _S.INSTALLING, _S.RELOADING})
#: The coordinator sees the worker as one that installs.
BUSY: Final = frozenset(
    {_S.PULLING, _S.WAITING_FOR_ATTEMPTS, _S.WAITING_FOR_LENDER, _S.CHANGING_ENGINE, _S.INSTALLING, _S.REPORTING}
)
#: A wish may be dropped: the engine has not been touched for it.
DROPPABLE: Final = frozenset({_S.PULLING, _S.WAITING_FOR_ATTEMPTS, _S.WAITING_FOR_LENDER})
#: Nothing of any version is in use here but what the engine serves.
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
    (_S.IDLE, _E.RESTORE): _S.RESTORING,  # once more, after it failed
    (_S.RESTING, _E.RESTORE): _S.RESTORING,
    (_S.RESTORING, _E.INSTALL): _S.RELOADING,
    (_S.RESTORING, _E.NOT_NOW): _S.RESTING,
    (_S.RESTORING, _E.END): _S.IDLE,
    (_S.RELOADING, _E.DONE): _S.RESTORING,
}


def transition(state: InstallState, event: InstallEvent) -> Transition:
    """Raises `ValueError` for an event that cannot be in this state."""
    if (after := _NEXT.get((state, event))) is None:
        raise ValueError(f"{event.name} cannot be while {state.name}")
    deeds = []
    if (state in HOLDING) != (after in HOLDING):
        deeds.append(Deed.HOLD if after in HOLDING else Deed.RELEASE)
    if (state in BUSY) != (after in BUSY):
        deeds.append(Deed.TELL)
    if after in SETTLED and state not in SETTLED:
        deeds.append(Deed.GIVE_BACK)
    if state is _S.RESTORING and after is _S.IDLE:
        deeds.append(Deed.WAKE)
    return Transition(after, tuple(deeds))
