"""Tells workers to flush less often: those of a large fleet, and all while many interactive rollouts are generated.

Lost with the process: the next coordinator tells workers its own intervals as they attach.
"""

import asyncio
from typing import Final

from ebbtide import telemetry
from ebbtide.coordinator import metrics
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.scheduling.health.flush_pacing import flush_interval_s, interactive_interval_s
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
