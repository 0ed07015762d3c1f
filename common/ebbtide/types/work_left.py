"""Defines what a trainer is told of a run's open groups and engines, to decide when it lends its devices."""

from typing import Annotated, Final

from msgspec import Meta, Struct

#: Longest time that a request waits for a change of the fleet, and groups that are described in an answer at most.
MOST_WAIT_S: Final = 20.0
MOST_GROUPS: Final = 96
_Measure = Annotated[float, Meta(ge=0, le=1e9)]


class OpenGroup(Struct, frozen=True, kw_only=True, gc=False):
    """A group of which not all responses have ended. Lengths in tokens; fields as in the contract."""

    prompt: int
    running: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()


class WorkLeft(Struct, frozen=True, kw_only=True):
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
