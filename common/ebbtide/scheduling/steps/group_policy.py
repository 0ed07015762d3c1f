"""Decides what becomes of a group whose episodes end one by one, some without a reward.

A group's episodes are completed all at once, when all are decided: so every trajectory states its group's true size,
and a restarted driver finds a group either undecided or decided.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Final, Literal, NamedTuple

Setting = Literal["replace", "shrink", "drop"]

#: Tries at one sample: after three failures a fourth will not help.
MAX_TRIES: Final = 3
#: Group-normalised advantages need at least so many.
MIN_GROUP: Final = 2


class SampleState(Enum):
    RUNNING = "running"
    SCORED = "scored"
    FAILED = "failed"


class SampleOutcome(NamedTuple):
    state: SampleState = SampleState.RUNNING  # of the sample's newest episode
    tries: int = 1


class GroupVerdict(Enum):
    WAIT = "wait"
    REPLACE = "replace"
    COMPLETE = "complete"
    DROP = "drop"


class GroupDecision(NamedTuple):
    verdict: GroupVerdict
    samples: tuple[int, ...] = ()  # indices: to retry for REPLACE, the group's trajectories for COMPLETE


def decide(samples: Sequence[SampleOutcome], *, setting: Setting) -> GroupDecision:
    """The verdict on a group now. Call again whenever a sample's state changes, until COMPLETE or DROP."""
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
