"""Records the calls of runs and attempts: the model's classes, each of whose methods that decisions depend on tells the
recorder before it does its work.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, Final, cast

from ebbtide.coordinator.recording import attempt_calls, run_calls
from ebbtide.coordinator.recording.call_recorder import CallRecorder
from ebbtide.coordinator.recording.decisions import MoveAsked
from ebbtide.coordinator.recording.model_call import ModelCall
from ebbtide.coordinator.state.dispatch_wakeups import DispatchWakeups
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.running_attempt import OrphanedAttempt, RunningAttempt
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.scheduling.dispatch.rollout_queue import QueuedRollout, RolloutQueue
from ebbtide.types.run import RunSpec
from ebbtide.types.weights import PolicyVersion


class RecordedAttempt(RunningAttempt, kw_only=True, eq=False):
    serial: int = 0  # its place among all attempts made, from 1 on

    def __post_init__(self) -> None:
        super().__post_init__()
        made = run_calls.AttemptMade(
            self.run_id, self.attempt_id, self.rollout, self.start, self.max_tokens, self.number, self.given,
            self.orphaned,
        )  # fmt: skip
        with self._recorder.handed(made):
            self.serial = self._recorder.new_serial()

    @property
    def _recorder(self) -> CallRecorder:
        return cast("RecordedRunState", self.run).recorder

    def begin(self, now: float) -> None:
        with self._recorder.handed(attempt_calls.AttemptBegun(self.serial, now)):
            super().begin(now)

    def believe_stored(self, tokens: int) -> None:
        with self._recorder.handed(attempt_calls.StoredBelieved(self.serial, tokens)):
            super().believe_stored(tokens)

    def assign(self, session: WorkerSession) -> None:
        with self._recorder.handed(attempt_calls.AttemptAssigned(self.serial, session.session_id)):
            super().assign(session)

    def unassign(self) -> None:
        with self._recorder.handed(attempt_calls.AttemptUnassigned(self.serial)):
            super().unassign()

    def orphan(self, orphaned: OrphanedAttempt, *, lost: int | None = None) -> None:
        with self._recorder.handed(attempt_calls.AttemptOrphaned(self.serial, orphaned, lost)):
            super().orphan(orphaned, lost=lost)

    def set_due(self, due: float) -> None:
        with self._recorder.handed(attempt_calls.DueSet(self.serial, due)):
            super().set_due(due)

    def leave(self) -> None:
        with self._recorder.handed(attempt_calls.AttemptLeft(self.serial)):
            super().leave()

    def move_to(self, worker_id: str) -> None:
        self._recorder.decide(MoveAsked(self.serial, worker_id))
        super().move_to(worker_id)


def serial_of(attempt: RunningAttempt | None) -> int:
    """The serial number of an attempt of a recorded run; 0 for none."""
    return cast("RecordedAttempt", attempt).serial if attempt is not None else 0


class RecordedRunState(RunState):
    attempt_class: ClassVar[type[RunningAttempt]] = RecordedAttempt

    def __init__(
        self,
        run_id: str,
        spec: RunSpec,
        wakeups: DispatchWakeups,
        clock: Callable[[], float],
        recorder: CallRecorder,
    ) -> None:
        self.recorder: Final = recorder
        super().__init__(run_id, spec, wakeups, clock)

    def _handed(self, call: ModelCall) -> AbstractContextManager[None]:
        """Record the call, unless the run is over: some calls come late, and nothing depends on them."""
        return nullcontext() if self.ended else self.recorder.handed(call)

    # The mirror as a whole.

    def set_stale(self, stale: bool) -> None:
        with self._handed(run_calls.StaleSet(self.run_id, stale)):
            super().set_stale(stale)

    def pause(self, error: Exception, now: float | None = None) -> float:
        with self._handed(run_calls.RunPaused(self.run_id, str(error), now)):
            return super().pause(error, now)

    def reread(
        self, versions: Mapping[int, PolicyVersion], queue: RolloutQueue, running: Mapping[str, RunningAttempt]
    ) -> list[RunningAttempt]:
        serials = [serial_of(one) for one in running.values()]
        with self._handed(run_calls.RunReread(self.run_id, list(versions.values()), list(queue), serials)):
            return super().reread(versions, queue, running)

    def doubt(self) -> None:
        with self._handed(run_calls.RunDoubted(self.run_id)):
            super().doubt()

    def note_reconciled(self) -> None:
        with self._handed(run_calls.RunReconciled(self.run_id)):
            super().note_reconciled()

    # Its rollouts.

    def note_context(self, tokens: int) -> None:
        with self._handed(run_calls.ContextNoted(self.run_id, tokens)):
            super().note_context(tokens)

    def admit(self, one: QueuedRollout) -> None:
        with self._handed(run_calls.Admitted(self.run_id, one)):
            super().admit(one)

    def take_queued(self, rollout_id: str) -> QueuedRollout | None:
        with self._handed(run_calls.QueuedTaken(self.run_id, rollout_id)):
            return super().take_queued(rollout_id)

    def start(self, attempt: RunningAttempt, session: WorkerSession) -> bool:
        with self._handed(run_calls.AttemptStarted(self.run_id, serial_of(attempt), session.session_id)):
            return super().start(attempt, session)

    def put_back(self, attempt: RunningAttempt, queued: QueuedRollout | None) -> None:
        with self._handed(run_calls.PutBack(self.run_id, serial_of(attempt), queued)):
            super().put_back(attempt, queued)

    def end(self, rollout_id: str, attempt_id: str = "") -> RunningAttempt | None:
        with self._handed(run_calls.RolloutEnded(self.run_id, rollout_id, attempt_id)):
            return super().end(rollout_id, attempt_id)

    def finish(self, rollout_id: str, attempt_id: str, *, durable_before: float = math.inf) -> RunningAttempt | None:
        with self._handed(run_calls.RolloutFinished(self.run_id, rollout_id, attempt_id, durable_before)):
            return super().finish(rollout_id, attempt_id, durable_before=durable_before)

    def unfinish(self, durable_before: float) -> set[RunningAttempt]:
        with self._handed(run_calls.FinishesForgotten(self.run_id, durable_before)):
            return super().unfinish(durable_before)

    def accept_tokens(self, attempts: Sequence[RunningAttempt | None], ends: Sequence[int]) -> None:
        call = run_calls.TokensStored(self.run_id, [serial_of(one) for one in attempts], list(ends))
        with self._handed(call):
            super().accept_tokens(attempts, ends)

    def forget_episode(self, episode_id: str) -> None:
        with self._handed(run_calls.EpisodeForgotten(self.run_id, episode_id)):
            super().forget_episode(episode_id)

    def unconfirm(self, attempt: RunningAttempt, due: float, *, newer: bool) -> None:
        with self._handed(run_calls.AttemptUnconfirmed(self.run_id, serial_of(attempt), due, newer)):
            super().unconfirm(attempt, due, newer=newer)

    def confirm(self, rollout_id: str) -> None:
        with self._handed(run_calls.AttemptConfirmed(self.run_id, rollout_id)):
            super().confirm(rollout_id)

    def drop_unconfirmed(self, attempt: RunningAttempt) -> None:
        with self._handed(run_calls.UnconfirmedDropped(self.run_id, serial_of(attempt))):
            super().drop_unconfirmed(attempt)

    # Its versions.

    def announce(self, version: PolicyVersion) -> None:
        with self._handed(run_calls.VersionAnnounced(self.run_id, version)):
            super().announce(version)

    def note_installed(self, version: int, architecture: str) -> None:
        with self._handed(run_calls.InstallNoted(self.run_id, version, architecture)):
            super().note_installed(version, architecture)

    def note_architecture(self, architecture: str) -> None:
        with self._handed(run_calls.ArchitectureNoted(self.run_id, architecture)):
            super().note_architecture(architecture)

    def note_misfit(self) -> None:
        with self._handed(run_calls.MisfitNoted(self.run_id)):
            super().note_misfit()

    def note_failed_install(self, version: int) -> None:
        with self._handed(run_calls.FailedInstallNoted(self.run_id, version)):
            super().note_failed_install(version)

    def note_tokens_stored(self) -> None:
        with self._handed(run_calls.TokensNoted(self.run_id)):
            super().note_tokens_stored()
