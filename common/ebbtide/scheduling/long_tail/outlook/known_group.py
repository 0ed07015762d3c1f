"""Keeps what is known of the lengths of one group's samples while some of them are open."""

from bisect import bisect_right
from collections.abc import Mapping
from typing import Final, Protocol

from msgspec import Struct

from ebbtide.scheduling.long_tail.length_correlation import evenly
from ebbtide.scheduling.long_tail.length_forecast import LengthForecast, LengthOutlook
from ebbtide.scheduling.long_tail.length_learner import EndedGroup, UnfinishedGroup

#: A forecast is made anew once some sample has made so much more than it knew of, and at least so many tokens.
_GROWN, _LEAST_GROWN = 1.15, 64
#: Tokens made are known by so many leading bits, to a sixteenth: samples that began together then have one outlook.
_KNOWN_BITS: Final = 5
#: Groups may have thousands of samples. A forecast is inferred from so many of them, and tells apart so many lengths of
#: open ones: it costs as much as these.
_SAMPLES: Final = 256
_TOLD_APART: Final = 64


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
    finished: list[int] = []  # whole responses, in the order in which they ended
    stopped: list[int] = []  # made by those that came to their cap, or were cancelled
    probe: str = ""  # the sample that goes first, while none has begun
    begun: bool = False
    forecast: LengthForecast | None = None
    outdated: bool = False  # more is known than `forecast` knew of
    knew: dict[str, int] = {}  # what its open samples had made at least when `forecast` was made
    outlooks: dict[int, LengthOutlook] = {}  # by tokens made, of `forecast`

    @property
    def untouched(self) -> bool:
        """Whether nothing is known of it but its prompt."""
        return not (self.begun or self.finished or self.stopped)

    @property
    def due(self) -> bool:
        """Whether its forecast is to be made anew: its samples have made much more than that knew of, for example."""
        if self.outdated or (self.forecast is None and self.begun and bool(self.running or self.waiting)):
            return True
        made = _roughly(max((one.made for one in self.running.values()), default=0))
        knew = max((self.knew.get(name, 0) for name in self.running), default=0)
        return made > max(_GROWN * knew, knew + _LEAST_GROWN)

    def made(self) -> dict[str, int]:
        """What its open samples have made at least, as far as forecasts tell it apart."""
        made = {name: _roughly(one.made) for name, one in (*self.running.items(), *self.waiting.items())}
        levels = sorted(set(made.values()))
        if len(levels) > _TOLD_APART:
            levels = [*evenly(levels, _TOLD_APART)]
            made = {name: levels[bisect_right(levels, one) - 1] for name, one in made.items()}
        return made

    def knows(self, made: Mapping[str, int]) -> UnfinishedGroup:
        """What a forecast may know of it, with what its open samples have `made`."""
        total = len(self.finished) + len(self.stopped) + len(made)
        finished, stopped, open_ = (
            evenly(some, -(-len(some) * _SAMPLES // max(_SAMPLES, total)))  # of each its part
            for some in (self.finished, self.stopped, sorted(made.values()))
        )
        return UnfinishedGroup(
            finished=tuple(finished), stopped=tuple(stopped), made=tuple(open_), prompt=self.prompt, cap=self.cap
        )

    def told(self) -> EndedGroup:
        """What it teaches once no sample is open."""
        ended = [(tokens, True) for tokens in self.finished] + [(tokens, False) for tokens in self.stopped]
        some = evenly(ended, _SAMPLES)
        return EndedGroup(
            lengths=tuple(tokens for tokens, whole in some if whole),
            stopped=tuple(tokens for tokens, whole in some if not whole),
            prompt=self.prompt,
        )


def _roughly(made: int) -> int:
    """Tokens that were certainly made."""
    beyond = max(0, made.bit_length() - _KNOWN_BITS)
    return made >> beyond << beyond
