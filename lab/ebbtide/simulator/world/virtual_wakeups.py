"""Plans the coordinator's rounds in virtual time, as its loops wait for them live.

Invariant: as in `Dispatcher.decide_for_ever`, a round comes once the changes after the first one were gathered, or
after a pause if nothing changes. What changes during a round is gathered for the next one.
"""

from collections.abc import Callable
from math import inf

from ebbtide.coordinator.state.dispatch_wakeups import DispatchWakeups
from ebbtide.simulator.world.virtual_time import Alarm, VirtualTime


class VirtualWakeups(DispatchWakeups):
    """`decide_round` returns the longest pause until the next round; `reap_round` when
    the next orphan is due; `gather_s` for how long changes are gathered."""

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
