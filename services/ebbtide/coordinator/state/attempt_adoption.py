"""Decides which attempts a worker that attaches with them continues."""

from collections.abc import Iterable

from ebbtide.coordinator.rules.rollout_queue import QueuedRollout
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.running_attempt import RunningAttempt
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.scheduling.steps.step_pacing import VersionBounds
from ebbtide.types.fleet import AttemptRef


def adopt(
    state: CoordinatorState, session: WorkerSession, held: Iterable[AttemptRef]
) -> tuple[list[AttemptRef], list[AttemptRef]]:
    """Sort a worker's attempts into those that continue and those that are over."""
    adopted, superseded = [], []
    for ref in held:
        run = state.runs.get(ref.run_id)
        attempt = run.running.get(ref.rollout_id) if run else None
        if run is not None and keep_unconfirmed(state, run, ref, session):
            adopted.append(ref)
        elif attempt is None or attempt.attempt_id != ref.attempt_id or not _free(attempt, session):
            superseded.append(ref)
        else:
            attempt.assign(session)
            adopted.append(ref)
    return adopted, superseded


def keep_unconfirmed(state: CoordinatorState, run: RunState, ref: AttemptRef, session: WorkerSession) -> bool:
    """Whether a worker may keep, for now, an attempt that this coordinator does not know: the store forgot it, or it
    began just before store and coordinator restarted together.
    """
    unconfirmed = run.unconfirmed.get(ref.rollout_id)
    if unconfirmed is None and state.doubtful and ref.rollout_id not in run.running:
        nothing = VersionBounds(0, 0)
        queued = QueuedRollout(rollout_id=ref.rollout_id, episode_id="", bounds=nothing, length=0, place=0)
        now = state.clock()  # it was given earlier, which would make the worker seem stalled
        attempt = run.new_attempt(ref.attempt_id, queued, start=0, max_tokens=1 << 32, given=now)
        run.unconfirm(attempt, state.doubt_until, newer=False)
        run.mark_stale()
        unconfirmed = run.unconfirmed[ref.rollout_id]
    if unconfirmed is None or unconfirmed.attempt.attempt_id != ref.attempt_id:
        return False
    unconfirmed.attempt.assign(session)
    return True


def _free(attempt: RunningAttempt, session: WorkerSession) -> bool:
    """Whether the worker that attached with the attempt may continue it: no other worker has it, nor is it leaving."""
    other = attempt.session is not None and attempt.session.worker_id != session.worker_id
    taken = attempt.orphaned is not None and attempt.orphaned.why.avoid
    return not other and not taken and not attempt.leaving
