"""What becomes of a group whose episodes end one by one, some of them without a reward.

A group's episodes are completed all at once, when all of it is decided: so that every trajectory states the true size
of its group, and a driver that starts again finds a group either wholly undecided or decided.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Final, Literal, NamedTuple

Setting = Literal["replace", "shrink", "drop"]

#: Tries at one sample before its group gives it up: what failed three times will not be cured by a fourth try.
MAX_TRIES: Final = 3
#: The least that group-normalised advantages can be computed of.
MIN_GROUP: Final = 2


class SampleState(Enum):
    RUNNING = "running"
    SCORED = "scored"
    FAILED = "failed"


class SampleOutcome(NamedTuple):
    """One of a group's samples: the state of its newest episode, and how many episodes were tried for it."""

    state: SampleState = SampleState.RUNNING
    tries: int = 1


class GroupVerdict(Enum):
    WAIT = "wait"
    REPLACE = "replace"
    COMPLETE = "complete"
    DROP = "drop"


class GroupDecision(NamedTuple):
    """`samples` (indices): to try again for REPLACE, the group's trajectories for COMPLETE."""

    verdict: GroupVerdict
    samples: tuple[int, ...] = ()


def decide(samples: Sequence[SampleOutcome], *, setting: Setting) -> GroupDecision:
    """What to do with a group now. Called again whenever a sample's state changes, until it says COMPLETE or DROP."""
    failed = _having(samples, SampleState.FAILED)
    again = tuple(index for index in failed if samples[index].tries < MAX_TRIES)
    if setting == "replace" and again:
        return GroupDecision(GroupVerdict.REPLACE, again)
    if _having(samples, SampleState.RUNNING):
        return GroupDecision(GroupVerdict.WAIT)
    scored = _having(samples, SampleState.SCORED)
    enough = len(samples) if setting == "drop" else MIN_GROUP
    return GroupDecision(GroupVerdict.COMPLETE, scored) if len(scored) >= enough else GroupDecision(GroupVerdict.DROP)


def _having(samples: Sequence[SampleOutcome], state: SampleState) -> tuple[int, ...]:
    return tuple(index for index, sample in enumerate(samples) if sample.state is state)
