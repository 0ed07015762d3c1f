"""Lets a worker keep an attempt that the coordinator cannot confirm, until the store knows it or the time is up."""

import time

from ebbtide.coordinator.state.coordinator_state import (
    CoordinatorState,
    RunningAttempt,
    RunState,
    UnconfirmedAttempt,
    WorkerSession,
)
from ebbtide.scheduling.dispatch.rollout_queue import QueuedRollout
from ebbtide.scheduling.steps.step_pacing import VersionBounds
from ebbtide.types.fleet import AttemptRef


def keep_unconfirmed(state: CoordinatorState, run: RunState, ref: AttemptRef, session: WorkerSession) -> bool:
    """Whether a worker may keep, for now, an attempt that this coordinator does not know: the store forgot it, or it
    began just before store and coordinator restarted together.
    """
    unconfirmed = run.unconfirmed.get(ref.rollout_id)
    if unconfirmed is None and state.doubtful and ref.rollout_id not in run.running:
        nothing = VersionBounds(0, 0)
        queued = QueuedRollout(rollout_id=ref.rollout_id, episode_id="", bounds=nothing, length=0, place=0)
        attempt = RunningAttempt(
            run_id=ref.run_id,
            attempt_id=ref.attempt_id,
            rollout=queued,
            start=0,
            max_tokens=1 << 32,
            given=time.monotonic(),  # not known; an earlier time would make the worker seem stalled
        )
        unconfirmed = run.unconfirmed[ref.rollout_id] = UnconfirmedAttempt(attempt, state.doubt_until, newer=False)
        run.stale = True
    if unconfirmed is None or unconfirmed.attempt.attempt_id != ref.attempt_id:
        return False
    unconfirmed.attempt.assign(session)
    return True
