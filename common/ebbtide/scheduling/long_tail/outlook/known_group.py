"""Keeps what is known of the lengths of one group's samples while some of them are open."""

from typing import Protocol

from msgspec import Struct

from ebbtide.scheduling.long_tail.length_forecast import LengthForecast, LengthOutlook
from ebbtide.scheduling.long_tail.length_learner import EndedGroup, UnfinishedGroup

#: A forecast is made anew once some sample has made so much more than it knew of, and at least so many tokens.
_GROWN, _LEAST_GROWN = 1.15, 64


class OpenSample(Protocol):
    """A rollout that waits or runs."""

    @property
    def made(self) -> int:
        """Tokens of its response that are stored."""
        ...


class KnownGroup(Struct, eq=False, kw_only=True):
    """Lengths in tokens. `waiting`, `running`: its open samples, by rollout."""

    place: int
    prompt: str = ""  # a digest, equal in each epoch; "": not known
    cap: int  # the longest response
    waiting: dict[str, OpenSample] = {}
    running: dict[str, OpenSample] = {}
    finished: list[int] = []
    stopped: list[int] = []  # made by those that came to their cap, or were cancelled
    probe: str = ""  # the sample that goes first, while none has begun
    begun: bool = False
    forecast: LengthForecast | None = None
    outdated: bool = False  # more is known than `forecast` knew of
    knew: dict[str, int] = {}  # what its open samples had made when `forecast` was made
    outlooks: dict[int, LengthOutlook] = {}  # by tokens made, of `forecast`

    @property
    def untouched(self) -> bool:
        """Whether nothing is known of it but its prompt."""
        return not (self.begun or self.finished or self.stopped)

    @property
    def outgrown(self) -> bool:
        """Whether its samples have made much more than its forecast knew of."""
        made = max((one.made for one in self.running.values()), default=0)
        knew = max((self.knew.get(name, 0) for name in self.running), default=0)
        return made > max(_GROWN * knew, knew + _LEAST_GROWN)

    def knows(self) -> UnfinishedGroup:
        """What a forecast may know of it; notes it in `knew`."""
        self.knew = {name: one.made for name, one in (*self.running.items(), *self.waiting.items())}
        return UnfinishedGroup(
            finished=tuple(self.finished),
            stopped=tuple(self.stopped),
            made=tuple(self.knew.values()),
            prompt=self.prompt,
            cap=self.cap,
        )

    def told(self) -> EndedGroup:
        """What it teaches once no sample is open."""
        return EndedGroup(lengths=tuple(self.finished), stopped=tuple(self.stopped), prompt=self.prompt)
