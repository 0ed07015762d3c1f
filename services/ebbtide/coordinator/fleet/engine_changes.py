"""Says which runs need an engine restart on which worker, and whether it is allowed. `allotment` weighs whether it
pays.

Invariant: a run's architecture is known once a worker has installed or refused its weights. An architecture that a
worker's engine could not be started for is not tried there again for `_REFUSED_S`. Lost with the process, and learnt
again from workers.
"""

from typing import Final

from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.worker_session import WorkerSession

#: How long a failed engine start is remembered.
_REFUSED_S: Final = 600.0


class EngineChanges:
    def __init__(self, state: CoordinatorState) -> None:
        self._state = state

    def barred(self, session: WorkerSession, now: float) -> frozenset[str]:
        """Runs that the worker may not serve; while its engine restarts for one, all others."""
        changing = session.changing
        if changing is not None and changing.restarted and changing.run_id in self._state.runs:
            return frozenset(self._state.runs.keys() - {changing.run_id})
        architecture = session.hello.engine.architecture
        foreign = [run for run in self._state.runs.values() if run.architecture and run.architecture != architecture]
        return frozenset(run.run_id for run in foreign if self.forbids(run, session, now))

    def needed(self, run: RunState, session: WorkerSession) -> bool:
        """Whether the run's weights fit the worker's engine only after a restart."""
        known = bool(run.architecture) and not session.version_of(run.run_id)
        return known and session.hello.engine.architecture != run.architecture

    def forbids(self, run: RunState, session: WorkerSession, now: float) -> bool:
        """Whether the worker's engine would have to restart for the run, and may not. A run that no worker can serve is
        still offered, so that refusals reveal it; so is one to a worker that never restarts its engine.
        """
        if not self.needed(run, session) or may_change(run, session, now):
            return False
        return session.beat.restart_s > 0 and (run.fitted or self.served_by_somebody(run, now))

    def served_by_somebody(self, run: RunState, now: float) -> bool:
        """Whether an attached worker has the run's architecture, or may restart for it."""
        open_sessions = (one for one in self._state.sessions.values() if not one.draining)
        return any(not self.needed(run, one) or may_change(run, one, now) for one in open_sessions)


def may_change(run: RunState, session: WorkerSession, now: float) -> bool:
    """Whether the worker's engine may restart for the run. It then has no tokenizer, which stop strings need."""
    refused = session.refused.get(run.architecture, 0.0) > now
    return session.beat.restart_s > 0 and not refused and not run.spec.sampling.stop


def refused(session: WorkerSession, architecture: str, now: float) -> None:
    """Note that the worker's engine could not be started for it."""
    session.refuse(architecture, now + _REFUSED_S)
