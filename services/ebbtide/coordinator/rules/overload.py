"""Decides what a coordinator leaves undone while it is late, and for how long silence proves nothing.

It is late if its event loop is, and also if messages wait before the loop sees them: gRPC hands them over one after
another, so with more of them than a core bears they queue there while timers still fire on time. Then heartbeats are
taken in long after they were sent (`HeartbeatDelay`). Late messages look like silence, so lateness is added to every
patience. And work gives way in a fixed order (`Work`), so that what workers live by, their heartbeats, is always taken
in. Invariant: lateness older than `WINDOW_S` is forgotten, so that a worker which really died is found however long the
overload lasts.
"""

from collections import deque
from enum import IntEnum
from math import inf
from statistics import median
from typing import Final

#: How often the loop's lateness is looked at.
TICK_S: Final = 0.05
#: A patience grows by the lateness of so many seconds: longer than a heartbeat and the way it waits at a late loop.
WINDOW_S: Final = 7.0
#: Lateness that is usual on a machine with other work. It costs no patience.
_USUAL_S: Final = 0.05
#: From which lateness on each work gives way; a busy loop is a few times later for a message than for a timer.
_GIVES_WAY_S: Final = (0.05, 0.1, 0.15, 0.25, 0.5)
#: The same for the median delay of heartbeats, which is taken over so many ticks.
_GIVES_WAY_DELAYED_S: Final = (0.3, 0.5, 0.75, 1.0, 2.0)
_DELAY_TICKS: Final = 20
#: So many heartbeats tell of the coordinator's delay: one or two may come from a machine that slept.
_TELLERS: Final = 4
#: Clocks of two machines drift apart by less than this.
_DRIFT: Final = 1e-3
#: Work that gave way is taken up again after so many seconds without such lateness, one after another.
_CALM_S: Final = 2.0


class Work(IntEnum):
    """What gives way, the first first."""

    STARTS = 1
    MOVES = 2
    FORECASTS = 3
    VIEWS = 4
    ACKNOWLEDGEMENTS = 5


class HeartbeatDelay:
    """By how much later heartbeats of a worker are taken in than the soonest of them, by the worker's own clock."""

    def __init__(self) -> None:
        self._zero, self._heard, self._uptime = inf, 0.0, 0.0

    def of(self, uptime_s: float, now: float) -> float | None:
        """The delay of a heartbeat that was sent at this `uptime_s`; None: it does not tell."""
        if uptime_s <= self._uptime:  # it started again, or does not count
            self._zero = inf
        else:
            self._zero = min(now - uptime_s, self._zero + _DRIFT * (now - self._heard))
        self._uptime, self._heard = uptime_s, now
        return now - uptime_s - self._zero if self._zero < inf else None


class Overload:
    """Call `ticked` every `TICK_S`; one whose `ticked` is never called is never late."""

    def __init__(self) -> None:
        self._due: float | None = None
        self._late: deque[tuple[float, float]] = deque()  # (when, seconds) of late ticks, not older than the window
        self._sum_s = 0.0  # of these
        self._calm_from = 0.0
        self._delays: list[float] = []
        self._ticks = 0
        self.lag_s = 0.0  # by which the last tick was late
        self.delay_s = 0.0  # the median of heartbeats' delays lately
        self.level = 0  # so many kinds of work give way
        self.since = 0.0  # when the first of them did

    def ticked(self, now: float) -> None:
        """Note that the loop had its turn."""
        self.lag_s = 0.0 if self._due is None else max(0.0, now - self._due)
        self._due = now + TICK_S
        if self.lag_s > _USUAL_S:
            self._late.append((now, self.lag_s))
            self._sum_s += self.lag_s
        self._forget(now)
        self._ticks += 1
        if self._ticks % _DELAY_TICKS == 0:
            self.delay_s, self._delays = median(self._delays) if len(self._delays) >= _TELLERS else 0.0, []
        level = max(_level(self.lag_s, _GIVES_WAY_S), _level(self.delay_s, _GIVES_WAY_DELAYED_S))
        if level and level >= self.level:
            self.since = self.since if self.level else now
            self.level, self._calm_from = level, now
        elif self.level and now - self._calm_from >= _CALM_S:
            self.level, self._calm_from = self.level - 1, now

    def delayed(self, seconds: float) -> None:
        """Note by how much a heartbeat was delayed."""
        self._delays.append(seconds)

    @property
    def behind_s(self) -> float:
        """By how much the coordinator is late now, as far as starts give way to it."""
        return max(self.lag_s, self.delay_s if self.delay_s > _GIVES_WAY_DELAYED_S[0] else 0.0)

    def _forget(self, now: float) -> None:
        while self._late and now - self._late[0][0] > WINDOW_S:
            self._sum_s -= self._late.popleft()[1]
        if not self._late:
            self._sum_s = 0.0  # no rounding remains

    def late_s(self, now: float) -> float:
        """By how much the loop was late lately, in all, with what it is late by now."""
        pending_s = 0.0 if self._due is None else now - self._due
        return self._sum_s + self.delay_s + (pending_s if pending_s > _USUAL_S else 0.0)

    @property
    def shed(self) -> list[Work]:
        """All work that gives way now."""
        return [work for work in Work if work <= self.level]


def _level(seconds: float, limits: tuple[float, ...]) -> int:
    return sum(seconds > least for least in limits)
