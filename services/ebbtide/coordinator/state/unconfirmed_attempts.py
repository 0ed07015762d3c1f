"""Lets a worker keep an attempt that the coordinator cannot confirm, until the store knows it or the time is over."""

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
    """Whether a worker may keep, for now, an attempt that this coordinator does not know.

    It may keep one that the store forgot, and one that began just before store and coordinator came back together.
    """
    widow = run.widows.get(ref.rollout_id)
    if widow is None and state.doubtful and ref.rollout_id not in run.running:
        nothing = VersionBounds(0, 0)
        stood = QueuedRollout(rollout_id=ref.rollout_id, episode_id="", bounds=nothing, length=0, place=0)
        attempt = RunningAttempt(
            run_id=ref.run_id,
            attempt_id=ref.attempt_id,
            waiting=stood,
            start=0,
            max_tokens=1 << 32,
            given=time.monotonic(),  # not known; as if now, so that it is not taken for one that waits
        )
        widow = run.widows[ref.rollout_id] = UnconfirmedAttempt(attempt, state.doubt_until, newer=False)
        run.stale = True
    if widow is None or widow.attempt.attempt_id != ref.attempt_id:
        return False
    widow.attempt.give(session)
    return True
