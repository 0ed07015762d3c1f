"""Tells the workers of a large fleet to flush less often.

Lost with the process: the next coordinator tells workers its own interval as they attach.
"""

import asyncio
from typing import Final

from ebbtide import telemetry
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.scheduling.health.flush_pacing import flush_interval_s

log = telemetry.get_logger(__name__)
#: While a fleet arrives, its interval changes about so often.
_EVERY_S: Final = 1.0


class FlushIntervals:
    """`per_s`: `flushes_per_s` of the settings."""

    def __init__(self, state: CoordinatorState, *, per_s: float) -> None:
        self._state, self._per_s = state, per_s
        self._least_s = 0.0

    def attached(self, session: WorkerSession) -> float:
        """The interval that the answer to its attach tells a worker, seconds."""
        session.pace_flushes(self._least_s, tell=False)
        return self._least_s

    async def pace_for_ever(self) -> None:
        while True:
            self.pace()
            await asyncio.sleep(_EVERY_S)

    def pace(self) -> None:
        """Tell all workers the interval that suits the fleet now, if it has changed."""
        sessions = self._state.sessions.values()
        least_s = flush_interval_s(len(sessions), per_s=self._per_s, present_s=self._least_s)
        if least_s == self._least_s:
            return
        log.info("flush interval", least_s=round(least_s, 3), workers=len(sessions))
        self._least_s = least_s
        for session in sessions:
            session.pace_flushes(least_s)
