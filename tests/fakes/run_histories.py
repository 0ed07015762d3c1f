"""A run's past as a coordinator tells it, made up: steps of two groups of two on two workers, of which one is lost."""

from typing import Any

from ebbtide.types.fleet import EndCause, Worker, WorkerKind, WorkerState
from ebbtide.types.run import AttemptSpan, BatchSpec, EnvironmentSpec, Run, RunEvent, RunSpec, RunStatus, TrainerSpec

#: A rollout gets a token each so many seconds, and so many more for each rollout that runs on its worker.
BASE_S = 0.02
ROLLOUT_S = 0.005
SPEC = RunSpec(
    name="math",
    model="m",
    environment=EnvironmentSpec(name="e"),
    batch=BatchSpec(groups_per_step=2, group_size=2),
    trainer=TrainerSpec(steps=3),
)


def span(rollout: str, worker: str, begin_s: float, end_s: float, last: int, **more: Any) -> AttemptSpan:
    """An attempt that finished rollout `sS.gG.K`, unless `more` says otherwise."""
    group, _, _ = rollout.rpartition(".")
    fields: dict[str, Any] = {
        "cursor": "", "rollout_id": rollout, "attempt_id": f"{rollout} {worker}", "worker_id": worker, "first": 0,
        "last": last, "begin_s": begin_s, "end_s": end_s, "end": "finished", "cause": EndCause.FINISHED,
        "first_version": 1, "last_version": 1, "group_id": group, "episode_id": rollout,
        "prompt_tokens": 100, "step": int(rollout[1]),
    }  # fmt: skip
    return AttemptSpan(**(fields | more))


def version(step: int, at_s: float) -> RunEvent:
    return RunEvent(kind="version", values={"version": float(step + 1), "step": float(step)}, age_s=at_s)


def trained(step: int, at_s: float) -> RunEvent:
    """The trainer's report of the step after which the weights have `step` steps behind them."""
    values = {"step": float(step), "seconds_train": 2.0, "seconds_publish": 0.5, "publish_bytes": 2e8 * step}
    return RunEvent(kind="step", values=values | {"publish_dense_bytes": 1.8e9}, age_s=at_s)


def worker_event(worker: str, state: str, at_s: float) -> RunEvent:
    return RunEvent(kind="worker", labels={"worker": worker, "state": state}, age_s=at_s)


def installed(worker: str, at_s: float) -> RunEvent:
    values = {"version": 2.0, "pull_s": 1.5, "pause_s": 0.25}
    return RunEvent(kind="installed", labels={"worker": worker}, values=values, age_s=at_s)


def history() -> tuple[Run, list[AttemptSpan], list[RunEvent], list[Worker]]:
    """Two steps that are over, and one under way. Rollout s1.g0.1 moved from the lost worker to the other one."""
    pace = BASE_S + 2 * ROLLOUT_S  # two at a time on each worker
    alone = BASE_S + ROLLOUT_S
    spans = []
    for step, opened in ((0, 10.0), (1, 100.0)):
        for group, worker in ((0, "w1"), (1, "w2")):
            end_s = opened + 1.0 + 400 * pace
            spans += [span(f"s{step}.g{group}.{k}", worker, opened + 1.0, end_s, 400) for k in (0, 1)]
    lost = spans.pop(5)
    cut = {"end": "worker lost: its stream broke", "group_id": "s1.g0"}
    spans.append(span(lost.rollout_id, "w2", 150.0, 150.0 + 300 * alone, 500, first=200))
    spans.insert(4, span(lost.rollout_id, "w1", 101.0, 107.0, 200, **cut))
    spans.append(span("s2.g0.0", "w2", 171.0, 172.0, 40))
    spans.append(span("e0.p1", "w2", 4.0, 5.0, 64, evaluation=True, step=None))
    spans.sort(key=lambda one: one.end_s)
    events = [
        version(0, 10.0), version(1, 100.0), version(2, 170.0), trained(1, 100.5), trained(2, 170.5),
        worker_event("w2", "attached", 2.0), worker_event("w1", "lost", 120.0), installed("w2", 101.0),
    ]  # fmt: skip
    listed = [
        Worker(worker_id="w2", kind=WorkerKind.SPOT, state=WorkerState.READY, slots=8),
        Worker(worker_id="elsewhere", kind=WorkerKind.RESERVED, state=WorkerState.READY, slots=8),
    ]
    counters = {"attempts": len(spans) + 3, "running": 3}
    return (
        Run(run_id="math-1", spec=SPEC, status=RunStatus.RUNNING, age_s=180.0, counters=counters),
        spans,
        events,
        listed,
    )
