"""Says which workers may get work, and why none may.

Invariant: a worker that was lost too often is quarantined (`Flapping`). Lost with the process: all are trusted.
"""

from collections.abc import Set

from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.scheduling.health.flapping import Flapping


class WorkerTrust:
    def __init__(self, state: CoordinatorState) -> None:
        self._state, self._flapping = state, Flapping()

    def attached(self, worker_id: str, now: float) -> None:
        """Note that the worker attached; it may have been attached already."""
        self._flapping.attached(worker_id, now)

    def left(self, worker_id: str) -> None:
        """Note that the worker left as announced."""
        self._flapping.left(worker_id)

    def lost(self, worker_id: str, now: float) -> None:
        """Note that the worker was lost without notice."""
        self._flapping.lost(worker_id, now)

    def trusts(self, session: WorkerSession, now: float) -> bool:
        """Whether the worker may get rollouts at all."""
        return not session.draining and not session.given_up and not self.quarantined_s(session, now)

    def quarantined(self, now: float) -> Set[str]:
        """The names of workers that were lost too often, and get no work now."""
        return self._flapping.quarantined(now)

    def quarantined_s(self, session: WorkerSession, now: float) -> float:
        """For how much longer a worker that was lost too often gets no work; 0.0 for any other."""
        return self._flapping.quarantined_s(session.worker_id, now)

    def lacking(self, now: float) -> str:
        """Why no attached worker may get work; "" if one may."""
        sessions = self._state.sessions.values()
        if any(self.trusts(session, now) for session in sessions):
            return ""
        if not sessions:
            return "waits for workers: none is attached"
        given_up = sum(bool(session.given_up) for session in sessions)
        but = f" or are given up ({given_up}): their hosts cost more than they bring" if given_up else ""
        return f"waits for workers: of {len(sessions)} attached, all drain or were lost too often{but}"
