"""Tells workers which version to install.

Invariant: a worker whose `target` is the run's newest version stays there, unless rollouts with a lower ceiling wait.
So only the others are looked at.
"""

from collections.abc import Callable

from ebbtide.coordinator.fleet.engine_changes import EngineChanges
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.scheduling.dispatch.target_versions import ServedVersion, target_versions
from ebbtide.v1 import fleet_pb2, types_pb2
from ebbtide.wire.record_conversion import to_proto


class InstallSender:
    """`public_key`: of a run's publisher, raw; workers verify versions with it."""

    def __init__(self, state: CoordinatorState, changes: EngineChanges, public_key: Callable[[str], bytes]) -> None:
        self._state, self._changes, self._public_key = state, changes, public_key

    def send(self, run: RunState, now: float) -> None:
        """Tell workers which version to install; those that still hold another run's rollouts are told later."""
        if not run.newest:
            return
        bounds, newest = run.queue.bounds(), (run.run_id, run.newest)
        kept = any(one.maximum and one.maximum < run.newest for one in bounds)
        serving = [one for one in self._state.serving(run.run_id) if kept or one.target != newest]
        if not serving:
            return
        may = [self._served(run, session) for session in serving if self._may_install(run, session, now)]
        for session_id, version in target_versions(may, bounds, run.versions).items():
            session = self._state.sessions[session_id]
            if version not in run.versions or session.target == (run.run_id, version):
                continue
            # Sent even if it attached with this version: the former coordinator may have sent another run's since.
            message = fleet_pb2.Install(
                version=to_proto(run.versions[version], types_pb2.PolicyVersion),
                run_id=run.run_id,
                model=run.spec.model,
                publisher=self._public_key(run.run_id),
            )
            session.install(run.run_id, message, now, restart=self._changes.needed(run, session))

    def _served(self, run: RunState, session: WorkerSession) -> ServedVersion:
        return ServedVersion(
            worker_id=session.session_id,
            installed=session.version_of(run.run_id),
            running=len(session.attempts),
            held=frozenset(bounds for _, bounds in session.held),
        )

    def _may_install(self, run: RunState, session: WorkerSession, now: float) -> bool:
        return (
            not session.draining
            and not session.given_up  # an install would disturb its host too
            and session.unfit.get(run.run_id, 0.0) <= now
            and not self._changes.forbids(run, session, now)
            and all(run_id == run.run_id for run_id, _ in session.held)
        )
