"""Keeps virtual time, and does what was planned for each moment in order.

Invariant: `now` never goes back, and what was planned for one moment is done in the order of planning. So the same
plans have the same outcome.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from math import inf

Deed = Callable[[], None]


class VirtualTime:
    """Seconds since the scenario's begin."""

    def __init__(self) -> None:
        self.now = 0.0
        self._plans: list[tuple[float, int, Deed]] = []
        self._numbers = count()

    def clock(self) -> float:
        """The present moment, as a function for those that read a clock."""
        return self.now

    def at(self, when: float, deed: Deed) -> None:
        """Do something at a moment; at once, but after all that is planned for now, if that has passed."""
        heappush(self._plans, (max(when, self.now), next(self._numbers), deed))

    def after(self, seconds: float, deed: Deed) -> None:
        self.at(self.now + seconds, deed)

    @property
    def next(self) -> float:
        """When the next thing is planned; inf for nothing."""
        return self._plans[0][0] if self._plans else inf

    def step(self) -> None:
        """Do all that is planned for the next moment."""
        plans = self._plans
        self.now = moment = plans[0][0]
        while plans and plans[0][0] <= moment:
            heappop(plans)[2]()


class Alarm:
    """A plan that can be put off or brought forward: only its last moment counts."""

    def __init__(self, time: VirtualTime, deed: Deed) -> None:
        self._time, self._deed = time, deed
        self._due = self._planned = inf

    @property
    def due(self) -> float:
        """When it rings; inf for never."""
        return self._due

    def set(self, when: float) -> None:
        """Ring at this moment, and at no other; inf: not at all."""
        self._due = when
        if when < self._planned:
            self._planned = when
            self._time.at(when, self._ring)

    def _ring(self) -> None:
        now = self._time.now
        if self._planned > now:  # an earlier plan took its place
            return
        self._planned = inf
        if self._due > now:
            self.set(self._due)
            return
        self._due = inf
        self._deed()
