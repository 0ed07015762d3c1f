"""Tells workers to flush less often: those of a large fleet, and all while many interactive rollouts are generated.

Lost with the process: the next coordinator tells workers its own intervals as they attach.
"""

import asyncio
from typing import Final

from ebbtide import telemetry
from ebbtide.coordinator import metrics
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.types.fleet import INTERACTIVE_FLUSH_S, FlushPace

log = telemetry.get_logger(__name__)
#: While a fleet arrives, its intervals change about so often.
_EVERY_S: Final = 1.0


class FlushIntervals:
    """`per_s`: `flushes_per_s` of the settings; `interactive`: `interactive_rollouts` of these."""

    def __init__(self, state: CoordinatorState, *, per_s: float, interactive: int) -> None:
        self._state, self._per_s, self._interactive = state, per_s, interactive
        self._pace = FlushPace()

    def attached(self, session: WorkerSession) -> FlushPace:
        """The intervals that the answer to its attach tells a worker."""
        session.pace_flushes(self._pace, tell=False)
        return self._pace

    async def pace_for_ever(self) -> None:
        while True:
            self.pace()
            await asyncio.sleep(_EVERY_S)

    def pace(self) -> None:
        """Tell all workers the intervals that suit the fleet now, if they have changed."""
        sessions, present = self._state.sessions.values(), self._pace
        rollouts = sum(session.interactive for session in sessions)
        least_s = flush_interval_s(len(sessions), per_s=self._per_s, present_s=present.least_s)
        interactive_s = interactive_interval_s(
            rollouts, most=self._interactive, batch_s=least_s, present_s=present.interactive_s
        )
        metrics.interactive_rollouts.set(rollouts)
        metrics.interactive_flush_seconds.set(max(INTERACTIVE_FLUSH_S, interactive_s))
        if (pace := FlushPace(least_s, interactive_s)) == present:
            return
        log.info(
            "flush intervals",
            least_s=round(least_s, 3),
            interactive_s=round(interactive_s, 3),
            workers=len(sessions),
            interactive=rollouts,
        )
        self._pace = pace
        for session in sessions:
            session.pace_flushes(pace)


#: At this interval all workers flush by default. A fleet that may flush so often is told nothing.
_SMALL_S: Final = 0.25
#: A lost worker loses what it made in about so long: not more, however large the fleet.
_LONGEST_S: Final = 4.0
#: A smaller change is not worth a message to each worker.
_STEP: Final = 1.25


def flush_interval_s(workers: int, *, per_s: float, present_s: float) -> float:
    """The least time between two flushes of a worker, seconds; 0.0 where the fleet is small. `per_s`: flushes of all
    workers together in a second, 0 without a limit. `present_s`: what workers were told last.

    The messages of a large fleet are to leave the coordinator time.
    """
    due = min(_LONGEST_S, workers / per_s) if per_s else 0.0
    return _steadied(due, present_s) if due > _SMALL_S else 0.0


def interactive_interval_s(rollouts: int, *, most: int, batch_s: float, present_s: float) -> float:
    """The least time between two messages of a worker for its interactive rollouts, seconds; 0.0, which means 50 ms,
    while at most `most` of them are generated. With more it grows in proportion to them, up to the interval of batch
    rollouts. `most`: 0 without a limit; `batch_s`: the fleet's `flush_interval_s`; `present_s`: what workers were told
    last.
    """
    if not most or rollouts <= most:
        return 0.0
    return _steadied(min(INTERACTIVE_FLUSH_S * rollouts / most, max(_SMALL_S, batch_s)), present_s)


def _steadied(due_s: float, present_s: float) -> float:
    """What is due, unless the present interval is near enough."""
    return present_s if present_s / _STEP <= due_s <= present_s * _STEP else due_s
