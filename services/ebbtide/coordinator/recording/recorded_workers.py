"""Records the calls of sessions and of the trust in workers, as `recorded_runs` does those of runs."""

from collections.abc import Sequence
from typing import Final

from ebbtide.coordinator.fleet.worker_trust import WorkerTrust
from ebbtide.coordinator.recording import worker_calls
from ebbtide.coordinator.recording.call_recorder import CallRecorder
from ebbtide.coordinator.recording.decisions import AskedBack, BorrowTold, InstallSent, RunServed
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.dispatch_wakeups import DispatchWakeups
from ebbtide.coordinator.state.session_index import SessionIndex
from ebbtide.coordinator.state.worker_reports import AttachReport, HeartbeatReport
from ebbtide.coordinator.state.worker_session import RunChange, WorkerSession
from ebbtide.types.fleet import AttemptRef, EngineInfo
from ebbtide.types.weights import PolicyVersion
from ebbtide.v1 import fleet_pb2


class RecordedSession(WorkerSession):
    def __init__(
        self,
        session_id: str,
        hello: AttachReport,
        now: float,
        wakeups: DispatchWakeups,
        index: SessionIndex,
        recorder: CallRecorder,
    ) -> None:
        self.recorder: Final = recorder
        super().__init__(session_id, hello, now, wakeups, index)

    # What it reports.

    def hear(self, beat: HeartbeatReport, now: float) -> bool:
        with self.recorder.handed(worker_calls.HeartbeatHeard(self.session_id, beat, now)):
            return super().hear(beat, now)

    def drain(self, reason: str) -> None:
        with self.recorder.handed(worker_calls.WorkerDrains(self.session_id, reason)):
            super().drain(reason)

    def message_came(self) -> None:
        with self.recorder.handed(worker_calls.MessageCame(self.session_id)):
            super().message_came()

    def tokens_came(self, now: float) -> None:
        with self.recorder.handed(worker_calls.TokensCame(self.session_id, now)):
            super().tokens_came(now)

    def message_answered(self) -> None:
        with self.recorder.handed(worker_calls.MessageAnswered(self.session_id)):
            super().message_answered()

    # Runs and their versions.

    def keep_serving(self, run_id: str, version: PolicyVersion) -> None:
        with self.recorder.handed(worker_calls.ServingKept(self.session_id, run_id, version)):
            super().keep_serving(run_id, version)

    def note_installed(self, run_id: str, version: PolicyVersion) -> RunChange | None:
        with self.recorder.handed(worker_calls.VersionInstalled(self.session_id, run_id, version)):
            return super().note_installed(run_id, version)

    def note_install_failed(self) -> RunChange | None:
        with self.recorder.handed(worker_calls.InstallFailureNoted(self.session_id)):
            return super().note_install_failed()

    def note_restarted(self, engine: EngineInfo) -> None:
        with self.recorder.handed(worker_calls.EngineRestarted(self.session_id, engine)):
            super().note_restarted(engine)

    def distrust_version(self) -> None:
        with self.recorder.handed(worker_calls.VersionDistrusted(self.session_id)):
            super().distrust_version()

    def bar(self, run_id: str, until: float) -> None:
        with self.recorder.handed(worker_calls.RunBarred(self.session_id, run_id, until)):
            super().bar(run_id, until)

    def refuse(self, architecture: str, until: float) -> None:
        with self.recorder.handed(worker_calls.ArchitectureRefused(self.session_id, architecture, until)):
            super().refuse(architecture, until)

    # What rounds decide.

    def serve(self, run_id: str, now: float) -> None:
        self.recorder.decide(RunServed(self.session_id, run_id))
        super().serve(run_id, now)

    def install(self, run_id: str, message: fleet_pb2.Install, now: float, *, restart: bool) -> None:
        self.recorder.decide(InstallSent(self.session_id, run_id, message.version.version, restart))
        super().install(run_id, message, now, restart=restart)

    def free(self, attempts: Sequence[AttemptRef], reason: str, now: float) -> None:
        self.recorder.decide(AskedBack(self.session_id, tuple(ref.attempt_id for ref in attempts), reason))
        super().free(attempts, reason, now)

    def tell_borrowed(self, *, wanted: bool, reason: str) -> None:
        self.recorder.decide(BorrowTold(self.session_id, wanted))
        super().tell_borrowed(wanted=wanted, reason=reason)


class RecordedTrust(WorkerTrust):
    def __init__(self, state: CoordinatorState, recorder: CallRecorder) -> None:
        super().__init__(state)
        self._recorder = recorder

    def attached(self, worker_id: str, now: float) -> None:
        with self._recorder.handed(worker_calls.WorkerAttached(worker_id, now)):
            super().attached(worker_id, now)

    def left(self, worker_id: str) -> None:
        with self._recorder.handed(worker_calls.WorkerLeft(worker_id)):
            super().left(worker_id)

    def lost(self, worker_id: str, now: float) -> None:
        with self._recorder.handed(worker_calls.WorkerLost(worker_id, now)):
            super().lost(worker_id, now)
