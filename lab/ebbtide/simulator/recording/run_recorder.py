"""Makes the record of a run from what a coordinator tells of it."""

from collections.abc import Sequence

from ebbtide.errors import NotReady
from ebbtide.simulator.recording.recorded_fleet import record_fleet
from ebbtide.simulator.recording.recorded_rollouts import gather_rollouts
from ebbtide.simulator.recording.recorded_run import RecordedRun, RecordedSpec
from ebbtide.simulator.recording.recorded_steps import installs, step_times
from ebbtide.types.fleet import Worker
from ebbtide.types.run import AttemptSpan, Run, RunEvent


def record_run(
    run: Run, spans: Sequence[AttemptSpan], events: Sequence[RunEvent], workers: Sequence[Worker]
) -> RecordedRun:
    """Makes the record of all steps that are over, and whose attempts the store still has.

    `spans` are in the order of their ends, as the coordinator sends them. Raises `NotReady` if there is no such step.
    """
    spec, batch = run.spec, run.spec.batch
    times = step_times(events)
    trimmed = len(spans) + run.counters.get("running", 0) < run.counters.get("attempts", 0)
    gathered = gather_rollouts(spans, times, batch, ended=run.status.ended, trimmed=trimmed)
    if not gathered.generated_s:
        why = "the store no longer has the attempts of a whole step" if trimmed else "no step of it is over"
        raise NotReady(
            f"run {run.run_id} cannot be recorded: {why}; record it while steps end, at most 16,384 attempts late"
        )
    fleet, engine = record_fleet(spans, events, workers)
    steps = [times.recorded(step, batch.max_staleness, end_s) for step, end_s in sorted(gathered.generated_s.items())]
    return RecordedRun(
        format=1,
        spec=RecordedSpec(
            name=spec.name,
            groups_per_step=batch.groups_per_step,
            group_size=batch.group_size,
            max_staleness=batch.max_staleness,
            max_tokens=spec.sampling.max_tokens,
            steps=spec.trainer.steps,
        ),
        until_s=max([one.end_s for one in spans] + [event.age_s for event in events]),
        rollouts=gathered.columns,
        workers=fleet,
        engine=engine,
        steps=[step for step in steps if step is not None],
        installs=installs(events),
        weights=times.weights(),
        left_out=gathered.left_out,
    )
