"""Judges once a second when a run's open rollouts end, and which may end last.

A large run is looked at in parts, so that no call takes long: what it says is then some seconds old.

Invariant: `end` and `latest` are those of the last whole look. Lost with the process; the next look makes
them anew.
"""

from collections.abc import Iterator
from heapq import heappush, heappushpop, nlargest
from typing import Final

from ebbtide.scheduling.long_tail.length_forecast import LengthOutlook
from ebbtide.scheduling.long_tail.outlook.known_group import KnownGroup
from ebbtide.scheduling.long_tail.outlook.run_forecasts import RunForecasts
from ebbtide.scheduling.long_tail.outlook.step_end import COMPARED, StepEnd, WaitingWork, step_end

_LOOK_EVERY_S: Final = 1.0
#: Groups in one call, and the rollouts after which it looks at no other: they take some two milliseconds.
_AT_ONCE: Final = 96
_ROLLOUTS_AT_ONCE: Final = 768
#: Rollouts that are shown to people.
_LATEST: Final = 3


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
            if len(self.last) < COMPARED:
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
