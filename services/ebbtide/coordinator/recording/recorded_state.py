"""Records the calls of the coordinator's state, whose runs and sessions are recorded, too."""

from ebbtide.coordinator.recording import run_calls, worker_calls
from ebbtide.coordinator.recording.call_recorder import CallRecorder
from ebbtide.coordinator.recording.recorded_runs import RecordedRunState
from ebbtide.coordinator.recording.recorded_workers import RecordedSession
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.worker_reports import AttachReport
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.types.run import RunSpec


class RecordedState(CoordinatorState):
    """Its clock is the recorder's."""

    def __init__(self, recorder: CallRecorder) -> None:
        super().__init__(recorder.clock)
        self._recorder = recorder

    def add_run(self, run_id: str, spec: RunSpec) -> RunState:
        with self._recorder.handed(run_calls.RunAdded(run_id, spec)):
            return super().add_run(run_id, spec)

    def drop_run(self, run: RunState) -> None:
        with self._recorder.handed(run_calls.RunDropped(run.run_id)):
            super().drop_run(run)

    def new_session(self, session_id: str, hello: AttachReport, now: float) -> WorkerSession:
        with self._recorder.handed(worker_calls.SessionMade(session_id, hello, now)):
            return super().new_session(session_id, hello, now)

    def attach(self, session: WorkerSession) -> None:
        with self._recorder.handed(worker_calls.SessionAttached(session.session_id)):
            super().attach(session)

    def detach(self, session: WorkerSession) -> None:
        with self._recorder.handed(worker_calls.SessionDetached(session.session_id)):
            super().detach(session)

    def shed(self, level: int) -> None:
        with self._recorder.handed(run_calls.LoadShed(level)):
            super().shed(level)

    def note_changeover(self, worker_id: str, seconds: float) -> None:
        with self._recorder.handed(worker_calls.ChangeoverNoted(worker_id, seconds)):
            super().note_changeover(worker_id, seconds)

    def _make_run(self, run_id: str, spec: RunSpec) -> RunState:
        return RecordedRunState(run_id, spec, self.wakeups, self.clock, self._recorder)

    def _make_session(self, session_id: str, hello: AttachReport, now: float) -> WorkerSession:
        return RecordedSession(session_id, hello, now, self.wakeups, self._index, self._recorder)
