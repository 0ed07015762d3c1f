"""Defines what a trainer learns of a run's open groups and engines, to decide when it lends its devices."""

from typing import Annotated, Final

from msgspec import Meta, Struct

#: Longest time that a request waits for a change of the fleet, and groups that are described in an answer at most.
MOST_WAIT_S: Final = 20.0
MOST_GROUPS: Final = 96
#: A step of an engine of which nothing is known: 30 tokens/s of each of 64 rollouts.
_UNKNOWN_STEP_S: Final = 0.02
_UNKNOWN_ROLLOUT_S: Final = 0.0002
#: No step is shorter.
_LEAST_S: Final = 1e-6
_Measure = Annotated[float, Meta(ge=0, le=1e9)]


class EnginePace(Struct, frozen=True, kw_only=True):
    """How long a typical engine takes for a step, in seconds, by its load and by the length of contexts.

    A decoding step reads all weights once, does some work for each rollout, and reads each rollout's context. With L
    rollouts of a mean context of C tokens it takes step_s + L (rollout_s + C context_s). No part is negative.
    """

    step_s: float = _UNKNOWN_STEP_S
    rollout_s: float = _UNKNOWN_ROLLOUT_S
    context_s: float = 0.0

    def seconds(self, load: float, context: float) -> float:
        """Of a step, and so of one token of each rollout. Loads below one are as fast as one."""
        return max(_LEAST_S, self.step_s + max(1.0, load) * (self.rollout_s + context * self.context_s))


class OpenGroup(Struct, frozen=True, kw_only=True, gc=False):
    """A group of which not all responses have ended. Lengths in tokens; fields as in the contract."""

    prompt: int
    running: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()


class RemainingWork(Struct, frozen=True, kw_only=True):
    """The work and the engines of one run. Lists from `engines` to `shares` have an entry for each engine."""

    fleet: str = ""  # names the engines as they are: a new one comes, another version is installed, a host is reclaimed
    groups: tuple[OpenGroup, ...] = ()  # some of the open ones, evenly picked in the order of the queue
    open: int = 0
    ended: int = 0  # groups whose responses have all ended, and whose trajectories are not made yet
    newest: int = 0  # version
    engines: tuple[str, ...] = ()
    speeds: tuple[float, ...] = ()  # in units of a typical engine
    versions: tuple[int, ...] = ()
    rollouts: tuple[int, ...] = ()
    lent: tuple[bool, ...] = ()
    spot: tuple[bool, ...] = ()
    shares: tuple[float, ...] = ()
    step_s: _Measure = 0.0
    rollout_s: _Measure = 0.0
    context_s: _Measure = 0.0

    def __post_init__(self) -> None:
        columns = (self.speeds, self.versions, self.rollouts, self.lent, self.spot, self.shares)
        if any(len(column) != len(self.engines) for column in columns):
            raise ValueError("the lists of engines differ in length")

    def pace(self) -> EnginePace:
        """The pace of a typical engine; that of an unknown one if nothing was measured."""
        if not (self.step_s or self.rollout_s or self.context_s):
            return EnginePace()
        return EnginePace(step_s=self.step_s, rollout_s=self.rollout_s, context_s=self.context_s)
