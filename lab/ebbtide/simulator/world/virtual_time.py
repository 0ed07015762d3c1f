"""Keeps virtual time, does what was planned for each moment in order, and plans the coordinator's rounds in it.

Invariant: `now` never goes back, and what was planned for one moment is done in the order of planning. So the same
plans have the same outcome.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from math import inf

from ebbtide.coordinator.state.notifier import DispatchWakeups

Action = Callable[[], None]


class VirtualTime:
    """Seconds since the scenario's begin."""

    def __init__(self) -> None:
        self.now = 0.0
        self._plans: list[tuple[float, int, Action]] = []
        self._numbers = count()

    def clock(self) -> float:
        """The present moment, as a function for those that read a clock."""
        return self.now

    def at(self, when: float, action: Action) -> None:
        """Do something at a moment; at once, but after all that is planned for now, if that has passed."""
        heappush(self._plans, (max(when, self.now), next(self._numbers), action))

    def after(self, seconds: float, action: Action) -> None:
        self.at(self.now + seconds, action)

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

    def __init__(self, time: VirtualTime, action: Action) -> None:
        self._time, self._action = time, action
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
        self._action()


class VirtualWakeups(DispatchWakeups):
    """`decide_round` returns the longest pause until the next round; `reap_round` when the next orphan is due;
    `gather_s` for how long changes are gathered.

    Invariant: as in `Dispatcher.decide_for_ever`, a round comes once the changes after the first one were gathered, or
    after a pause if nothing changes. What changes during a round is gathered for the next one.
    """

    def __init__(self, time: VirtualTime) -> None:
        super().__init__()
        self._time = time
        self._changed = self._gathering = self._deciding = False
        self._decide_due = Alarm(time, self._decide_now)
        self._reap_due = Alarm(time, self._reap_now)
        self._decide_round: Callable[[], float] = lambda: inf
        self._reap_round: Callable[[], float] = lambda: inf
        self._gather_s: Callable[[], float] = lambda: 0.0

    def begin(self, decide: Callable[[], float], reap: Callable[[], float], gather_s: Callable[[], float]) -> None:
        self._decide_round, self._reap_round, self._gather_s = decide, reap, gather_s
        self.decide()
        self.reap()

    def decide(self) -> None:
        """There may be something to decide."""
        self._changed = True
        if not self._deciding and not self._gathering:
            self._gather()

    def reap(self) -> None:
        """There may be an attempt to re-queue."""
        self._reap_due.set(self._time.now)

    def _gather(self) -> None:
        self._gathering = True
        self._decide_due.set(self._time.now + self._gather_s())

    def _decide_now(self) -> None:
        self._changed = self._gathering = False
        self._deciding = True
        pause = self._decide_round()
        self._deciding = False
        if self._changed:
            self._gather()
        else:
            self._decide_due.set(self._time.now + pause)

    def _reap_now(self) -> None:
        due = self._reap_round()
        self._reap_due.set(min(due, self._reap_due.due))
