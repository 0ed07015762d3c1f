"""Predicts how many turns will come back to each worker: those whose environment is at work now.

A session that waits for its environment holds no slot, but its worker has its prefix, and the next turn goes there. So
it counts as a part of a rollout: by the chance that it has another turn at all, and the share of the next turn's time
in which that one will probably run. With waits of mean W, memoryless, and turns of D seconds this share is
1 - W / D (1 - exp(-D / W)).

Invariant: `_idle` has the episodes that wait, with their sessions, those that wait longest first, and `_waiting` counts
them. Lost with the process; the next few dozen turns teach it again.
"""

from collections import Counter
from math import exp
from typing import Final, NamedTuple

#: Older observations fade: the last so many turns count most.
_MEMORY: Final = 256.0
#: An answer that takes so many times the usual time is no longer expected.
_OVERDUE: Final = 5.0
#: At least so long it is, whatever was learnt.
_LEAST_OVERDUE_S: Final = 10.0


class _Idle(NamedTuple):
    session_id: str
    since: float


class ExpectedReturns:
    def __init__(self) -> None:
        self._idle: dict[str, _Idle] = {}
        self._waiting: Counter[str] = Counter()
        self._ends = self._returns = 0.0  # turns that ended, and those that another one followed
        self._wait_s = self._turn_s = 0.0  # means

    def ended(self, episode_id: str, session_id: str, *, turn_s: float, now: float) -> None:
        """Note that a worker has finished a turn of the episode, which took so long."""
        self._drop(episode_id)
        fade = 1.0 - 1.0 / _MEMORY
        self._ends, self._returns = fade * self._ends + 1.0, fade * self._returns
        self._turn_s += (turn_s - self._turn_s) / min(_MEMORY, self._ends)
        self._idle[episode_id] = _Idle(session_id, now)
        self._waiting[session_id] += 1
        self._expire(now)

    def queued(self, episode_id: str, now: float) -> None:
        """Note that the episode's next turn has come."""
        idle = self._drop(episode_id)
        if idle is not None:
            self._returns += 1.0
            self._wait_s += (max(0.0, now - idle.since) - self._wait_s) / min(_MEMORY, self._returns + 1.0)

    def forget(self, episode_id: str) -> None:
        """Note that the episode has no further turn."""
        self._drop(episode_id)

    def beside(self, session_id: str) -> float:
        """Rollouts that a worker will have, on average over the next turn's time, from sessions that wait now."""
        waiting = self._waiting.get(session_id, 0)
        return waiting * self._chance * self._share if waiting else 0.0

    @property
    def _chance(self) -> float:
        return min(1.0, self._returns / self._ends) if self._ends else 0.0

    @property
    def _share(self) -> float:
        if self._turn_s <= 0.0:
            return 0.0
        waits = self._wait_s / self._turn_s
        return 1.0 - waits * (1.0 - exp(-1.0 / waits)) if waits > 0.0 else 1.0

    def _drop(self, episode_id: str) -> _Idle | None:
        idle = self._idle.pop(episode_id, None)
        if idle is not None:
            self._waiting[idle.session_id] -= 1
            if not self._waiting[idle.session_id]:
                del self._waiting[idle.session_id]
        return idle

    def _expire(self, now: float) -> None:
        """Expect no answers any more that are overdue."""
        before = now - max(_LEAST_OVERDUE_S, _OVERDUE * self._wait_s)
        while (first := next(iter(self._idle))) and self._idle[first].since < before:
            self._drop(first)
