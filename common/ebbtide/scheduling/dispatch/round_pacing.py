"""Paces the dispatcher's rounds: when the next one begins, and which of its parts are due in it."""

import math
from typing import Final

#: Pause after the first change, so that a burst is decided in one round. A round looks at all workers: with more than
#: `_GATHER_FLEET` of them it is longer in proportion, up to `_GATHER_MOST_S`.
_GATHER_S: Final = 0.01
_GATHER_FLEET: Final = 64
_GATHER_MOST_S: Final = 0.1
#: Longest pause between rounds, because some decisions depend on time alone.
TICK_S: Final = 0.25
#: Least time between two looks at workers' runs and versions: filling slots is more urgent.
_ARRANGE_S: Final = 0.05
#: How often the queue is searched for rollouts that no worker's context has room for.
_MEASURE_EVERY_S: Final = 1.0


def gather_s(workers: int) -> float:
    """How long changes are gathered before a round."""
    return min(_GATHER_MOST_S, _GATHER_S * max(1.0, workers / _GATHER_FLEET))


class RoundPacing:
    def __init__(self) -> None:
        self._arranged = self._measured = -math.inf
        self._unarranged = False

    def arranges(self, now: float) -> bool:
        """Whether the round that begins now looks at workers' runs and versions; else the next one comes soon."""
        due = self._arranged + _ARRANGE_S <= now
        self._unarranged = not due
        if due:
            self._arranged = now
        return due

    def measures(self, now: float) -> bool:
        """Whether the round that begins now searches the queues for rollouts that are too long."""
        due = now - self._measured >= _MEASURE_EVERY_S
        if due:
            self._measured = now
        return due

    def pause_s(self, held_s: float) -> float:
        """Seconds until the next round if nothing changes. `held_s`: see `StartPacing.held_s`."""
        pause = _ARRANGE_S if self._unarranged else TICK_S
        return min(pause, held_s) if held_s else pause
