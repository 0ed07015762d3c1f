"""Judges once a second when a run's open rollouts end, and how much each decides of that.

A large run is looked at in parts, so that no call takes long: what it says is then some seconds old.

Invariant: `end`, `latest` and `_worths` are those of the last whole look. Lost with the process; the next look makes
them anew.
"""

from collections.abc import Iterator
from heapq import nlargest
from typing import Final

from ebbtide.scheduling.long_tail.length_forecast import LengthOutlook
from ebbtide.scheduling.long_tail.outlook.known_group import KnownGroup
from ebbtide.scheduling.long_tail.outlook.run_forecasts import RunForecasts
from ebbtide.scheduling.long_tail.outlook.step_end import StepEnd, WaitingWork, step_end, worths

_LOOK_EVERY_S: Final = 1.0
#: Rollouts that are shown to people.
_LATEST: Final = 3
#: Groups in one call: they take some two milliseconds.
_AT_ONCE: Final = 96


class StepJudge:
    def __init__(self, forecasts: RunForecasts) -> None:
        self._forecasts = forecasts
        self._rest: Iterator[KnownGroup] | None = None  # groups that this look has not seen
        self._looked = -_LOOK_EVERY_S
        self._running: list[tuple[str, LengthOutlook]] = []
        self._waiting = WaitingWork()
        self.end = StepEnd(0.0, 0.0, 0.0)
        self._worths: dict[str, float] = {}  # by rollout; empty if all are worth the same
        self.latest: list[tuple[str, LengthOutlook]] = []  # the rollouts that run and may end last
        self.count = 0  # of whole looks

    def look(self, now: float) -> None:
        """Go on with a look, or begin one if it is time."""
        if self._rest is None:
            if now - self._looked < _LOOK_EVERY_S:
                return
            self._looked, self._running, self._waiting = now, [], WaitingWork()
            self._rest = iter(list(self._forecasts.groups))
        for _ in range(_AT_ONCE):
            group = next(self._rest, None)
            if group is None:
                self._rest = None
                self._judge()
                return
            self._see(group)

    def worth(self, rollout_id: str) -> float:
        """The worth of a rollout's tokens for the step's end, beside an average one's."""
        return self._worths.get(rollout_id, 1.0)

    def _see(self, group: KnownGroup) -> None:
        self._running += [(name, self._forecasts.outlook(group, name)) for name in group.running]
        if group.waiting:
            one, (tokens, longest) = self._forecasts.unstarted(group), self._waiting
            longest = one if longest is None or one.ninth > longest.ninth else longest
            self._waiting = WaitingWork(tokens + len(group.waiting) * one.expected, longest)

    def _judge(self) -> None:
        expected = [outlook for _, outlook in self._running]
        self.end = step_end(expected, self._waiting)
        found = worths(expected, self.end.tail) if self.end.tail > 0.0 and expected else ()
        self._worths = {name: worth for (name, _), worth in zip(self._running, found, strict=False)}
        self.latest = nlargest(_LATEST, self._running, key=lambda one: one[1].ninth)
        self.count += 1
