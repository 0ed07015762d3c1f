"""Judges once a second when a run's open rollouts end, and which may end last.

A large run is looked at in parts, so that no call takes long: what it says is then some seconds old. Times are in
tokens of a rollout, as if all ran equally fast. What waits begins as slots become free.

Invariant: `end` and `latest` are those of the last whole look. Lost with the process; the next look makes
them anew.
"""

from collections.abc import Iterator, Sequence
from heapq import heappush, heappushpop, nlargest
from math import prod
from typing import Final, NamedTuple

from ebbtide.scheduling.long_tail.length_forecast import LengthOutlook
from ebbtide.scheduling.long_tail.outlook.known_group import KnownGroup
from ebbtide.scheduling.long_tail.outlook.run_forecasts import RunForecasts

_LOOK_EVERY_S: Final = 1.0
#: Groups in one call, and the rollouts after which it looks at no other: they take some two milliseconds.
_AT_ONCE: Final = 96
_ROLLOUTS_AT_ONCE: Final = 768
#: Rollouts that are shown to people.
_LATEST: Final = 3
#: Rollouts whose ends are compared: those with the latest ones. The others hardly are the last.
_COMPARED: Final = 128
#: They find a time within a thousandth of the latest end.
_HALVED: Final = 10


class ExpectedEnd(NamedTuple):
    """Quantiles of when a sample ends, in tokens to come. They rise."""

    tenth: float
    half: float
    ninth: float  # nine in ten end by then


class WaitingWork(NamedTuple):
    """What waits: the tokens to come of all, and those of the rollout that may become longest."""

    tokens: float = 0.0
    longest: LengthOutlook | None = None


class StepEnd(NamedTuple):
    """In tokens of a rollout from now on."""

    half: float  # with probability one half, the step has ended by then
    ninth: float  # with probability nine tenths
    tail: float  # share of the time until `half` in which nothing waits, 0 to 1


def step_end(last: Sequence[LengthOutlook], waiting: WaitingWork, running: int) -> StepEnd:
    """When all have ended. `last`: of those that run the ones that may end last, `_COMPARED` of them; `running`: how
    many run. As many do so as long as anything waits.
    """
    drained = waiting.tokens / max(1, running)
    ends = [_end(one, 0.0) for one in last]
    if waiting.longest is not None:
        ends.append(_end(waiting.longest, drained))
    if not ends:
        return StepEnd(0.0, 0.0, 0.0)
    half, ninth = last_end(ends, 0.5), last_end(ends, 0.9)
    return StepEnd(half, ninth, 1.0 - min(1.0, drained / half) if half > 0.0 else 1.0)


def last_end(ends: Sequence[ExpectedEnd], share: float) -> float:
    """The time by which all have ended with this probability (0 to 1, both excluded). At least one end is needed."""
    low, high = 0.0, max(_latest(one) for one in ends)
    for _ in range(_HALVED):
        middle = 0.5 * (low + high)
        if prod(_ended(one, middle) for one in ends) < share:
            low = middle
        else:
            high = middle
    return high


def _latest(one: ExpectedEnd) -> float:
    """Where the last tenth of a sample's ends is taken to stop: lengths have long tails."""
    return one.ninth + 2.0 * (one.ninth - one.half)


def _ended(one: ExpectedEnd, time: float) -> float:
    """The probability that a sample has ended by a time: straight lines between the quantiles."""
    if time < one.tenth:
        return 0.1 * time / one.tenth if time > 0.0 else 0.0
    if time < one.half:
        return 0.1 + 0.4 * (time - one.tenth) / (one.half - one.tenth)
    if time < one.ninth:
        return 0.5 + 0.4 * (time - one.half) / (one.ninth - one.half)
    latest = _latest(one)
    return 0.9 + 0.1 * (time - one.ninth) / (latest - one.ninth) if time < latest else 1.0


def _end(one: LengthOutlook, begin: float) -> ExpectedEnd:
    return ExpectedEnd(begin + one.tenth, begin + one.half, begin + one.ninth)


class _Look:
    """What one look has seen so far: how many run, and those that may end last, with their names."""

    def __init__(self, forecasts: RunForecasts) -> None:
        self._forecasts = forecasts
        self.groups: Iterator[KnownGroup] = iter(list(forecasts.groups))
        self.running = 0
        self.last: list[tuple[float, str, LengthOutlook]] = []  # a heap
        self.waiting = WaitingWork()

    def see(self, group: KnownGroup) -> None:
        for name in group.running:
            self.running += 1
            if (outlook := self._forecasts.outlook(group, name)) is None:
                continue  # its group's forecast is still to be made
            entry = outlook.ninth, name, outlook
            if len(self.last) < _COMPARED:
                heappush(self.last, entry)
            else:
                heappushpop(self.last, entry)
        if group.waiting:
            one, (tokens, longest) = self._forecasts.unstarted(group), self.waiting
            longest = one if longest is None or one.ninth > longest.ninth else longest
            self.waiting = WaitingWork(tokens + len(group.waiting) * one.expected, longest)


class StepJudge:
    def __init__(self, forecasts: RunForecasts) -> None:
        self._forecasts = forecasts
        self._look: _Look | None = None
        self._looked = -_LOOK_EVERY_S
        self.end = StepEnd(0.0, 0.0, 0.0)
        self.latest: list[tuple[str, LengthOutlook]] = []  # the rollouts that run and may end last
        self.count = 0  # of whole looks

    def look(self, now: float) -> None:
        """Go on with a look, or begin one if it is time."""
        if self._look is None:
            if now - self._looked < _LOOK_EVERY_S:
                return
            self._looked, self._look = now, _Look(self._forecasts)
        seen, most = self._look, self._look.running + _ROLLOUTS_AT_ONCE
        for _ in range(_AT_ONCE):
            group = next(seen.groups, None)
            if group is None:
                self._judge(seen)
                self._look = None
                return
            seen.see(group)
            if seen.running >= most:
                return

    def _judge(self, seen: _Look) -> None:
        last = [outlook for _, _, outlook in seen.last]
        self.end = step_end(last, seen.waiting, seen.running)
        self.latest = [(name, outlook) for _, name, outlook in nlargest(_LATEST, seen.last)]
        self.count += 1
