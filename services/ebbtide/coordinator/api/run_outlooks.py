"""Describes for people what a run's rollouts have still to come."""

from collections.abc import Iterable
from statistics import fmean

from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.types.run import LongRollout, RunOutlook


def run_outlook(run: RunState, sessions: Iterable[WorkerSession]) -> RunOutlook | None:
    """What is expected now; None while the run's responses have taught nothing. `sessions`: of the fleet."""
    forecasts, judge = run.tail.forecasts, run.tail.judge
    if not forecasts.known:
        return None
    speeds = [one.rollout_tokens_per_s for one in sessions if one.run_id == run.run_id and one.rollout_tokens_per_s]
    speed, count = fmean(speeds) if speeds else 0.0, forecasts.coverage.count
    return RunOutlook(
        half_s=judge.end.half / speed if speed else 0.0,
        ninth_s=judge.end.ninth / speed if speed else 0.0,
        tail=judge.end.tail,
        longest=tuple(
            LongRollout(
                rollout_id=name,
                stored=attempt.stored,
                expected_tokens=round(outlook.expected),
                longest_tokens=round(outlook.longest),
            )
            for name, outlook in judge.latest
            if (attempt := run.running.get(name)) is not None
        ),
        alike=forecasts.learner.alike,
        forecast=count.ended,
        covered=count.covered,
    )
