"""Estimates once a second when a run's open rollouts end, and which may end last.

A large run is looked at in parts, so that no call takes long: what it says is then some seconds old. Times are in
tokens of a rollout, as if all ran equally fast. What waits begins as slots become free.

Invariant: `end` and `latest` are those of the last whole look. Lost with the process; the next look makes
them anew.
"""

from collections.abc import Iterator, Sequence
from heapq import heappush, heappushpop, nlargest
from typing import Final, NamedTuple

import numpy as np

from ebbtide.coordinator.forecasts.length_learner import LengthQuantiles
from ebbtide.coordinator.forecasts.run_forecasts import KnownGroup, RunForecasts

_LOOK_EVERY_S: Final = 1.0
#: Groups in one call, and the rollouts after which it looks at no other: they take some two milliseconds.
_AT_ONCE: Final = 96
_ROLLOUTS_AT_ONCE: Final = 768
#: Rollouts that are shown to people.
_LATEST: Final = 3
#: Rollouts whose ends are compared: those with the latest ones. The others hardly are the last.
_COMPARED: Final = 128
#: Moments among which the end is found.
_MOMENTS: Final = 512


class WaitingWork(NamedTuple):
    """What waits: the tokens to come of all, and those of the rollout that may become longest."""

    tokens: float = 0.0
    longest: LengthQuantiles | None = None


class StepEnd(NamedTuple):
    """In tokens of a rollout from now on."""

    half: float  # with probability one half, the step has ended by then
    ninth: float  # with probability nine tenths
    tail: float  # share of the time until `half` in which nothing waits, 0 to 1


def step_end(last: Sequence[LengthQuantiles], waiting: WaitingWork, running: int) -> StepEnd:
    """When all have ended. `last`: of those that run the ones that may end last, `_COMPARED` of them; `running`: how
    many run. As many do so as long as anything waits.
    """
    drained = waiting.tokens / max(1, running)
    ends = [(one.tenth, one.half, one.ninth) for one in last]
    if (longest := waiting.longest) is not None:
        ends.append((drained + longest.tenth, drained + longest.half, drained + longest.ninth))
    if not ends:
        return StepEnd(0.0, 0.0, 0.0)
    # Straight lines between the quantiles. Lengths have long tails: this is where the last tenth is taken to stop.
    knots = [(0.0, tenth, half, ninth, ninth + 2.0 * (ninth - half)) for tenth, half, ninth in ends]
    moments = np.linspace(0.0, max(one[-1] for one in knots), _MOMENTS)
    ended = np.prod([np.interp(moments, one, (0.0, 0.1, 0.5, 0.9, 1.0)) for one in knots], axis=0)
    half, ninth = (float(moments[np.searchsorted(ended, share)]) for share in (0.5, 0.9))
    return StepEnd(half, ninth, 1.0 - min(1.0, drained / half) if half > 0.0 else 1.0)


class _Look:
    """What one look has seen so far: how many run, and those that may end last, with their names."""

    def __init__(self, forecasts: RunForecasts) -> None:
        self._forecasts = forecasts
        self.groups: Iterator[KnownGroup] = iter(list(forecasts.groups))
        self.running = 0
        self.last: list[tuple[float, str, LengthQuantiles]] = []  # a heap
        self.waiting = WaitingWork()

    def see(self, group: KnownGroup) -> None:
        for name in group.running:
            self.running += 1
            if (quantiles := self._forecasts.quantiles(group, name)) is None:
                continue  # its group's forecast is still to be made
            entry = quantiles.ninth, name, quantiles
            if len(self.last) < _COMPARED:
                heappush(self.last, entry)
            else:
                heappushpop(self.last, entry)
        if group.waiting:
            one, (tokens, longest) = self._forecasts.unstarted(group), self.waiting
            longest = one if longest is None or one.ninth > longest.ninth else longest
            self.waiting = WaitingWork(tokens + len(group.waiting) * one.expected, longest)


class StepEta:
    def __init__(self, forecasts: RunForecasts) -> None:
        self._forecasts = forecasts
        self._look: _Look | None = None
        self._looked = -_LOOK_EVERY_S
        self.end = StepEnd(0.0, 0.0, 0.0)
        self.latest: list[tuple[str, LengthQuantiles]] = []  # the rollouts that run and may end last
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
        last = [quantiles for _, _, quantiles in seen.last]
        self.end = step_end(last, seen.waiting, seen.running)
        self.latest = [(name, quantiles) for _, name, quantiles in nlargest(_LATEST, seen.last)]
        self.count += 1
