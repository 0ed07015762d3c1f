"""Makes scenarios of a recorded run: its work on its own fleet, or on that of another scenario."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from ebbtide.checked_files.refusals import FileRefused, Problem
from ebbtide.simulator.engines.profile_files import write_profile
from ebbtide.simulator.recording.recorded_profiles import engine_of, link_gbps, trainer_of
from ebbtide.simulator.recording.recorded_run import RecordedRun, RecordedWorker
from ebbtide.simulator.recording.recorded_work import known_turns
from ebbtide.simulator.scenario.inputs.input_tables import InputTables
from ebbtide.simulator.scenario.inputs.spot_trace import SpotTrace, TraceEvent
from ebbtide.simulator.scenario.machine_pool import MachinePool, SpotTraceSpec
from ebbtide.simulator.scenario.scenario import LONGEST_H, Scenario
from ebbtide.simulator.scenario.training_run import TrainingRun

_ENGINE: Final = "engine.toml"
_TRAINER: Final = "trainer.toml"
#: The clouds' shortest notice. The record knows that machines had one, and not how long it was.
_NOTICE_S: Final = 30.0
#: The upload of a version is in the time to its announcement, and must not count twice: no link is faster.
_UPLOADED_GBPS: Final = 1e5
#: A fleet that left for good ends no step: the simulation is given up after so many times the record's length,
_PATIENCE: Final = 10.0
#: or after an hour if that is longer, so that a short record has time for boots and pulls.
_LEAST_H: Final = 1.0
#: As a scenario bounds it: more than this apart, machines are no like machines.
_MOST_APART: Final = 0.9


def recorded_fleet(recorded: RecordedRun, folder: Path, name: str) -> Scenario:
    """The run on its own fleet, with profiles that are written into `folder`. `name` is that of the record's file.

    Machines have no prices: the record has none. Raises `FileRefused` if engine, trainer or machines are not known.
    """
    if recorded.engine is None:
        told = "no attempt was long enough to measure an engine; name a scenario whose fleet gets these rollouts"
        raise _refused(name, "engine", told)
    if not recorded.steps:
        told = "the begin and end of no step are known, so no trainer was measured; name a scenario that has one"
        raise _refused(name, "steps", told)
    write_profile(engine_of(recorded, recorded.engine), folder / _ENGINE)
    write_profile(trainer_of(recorded), folder / _TRAINER)
    pools = list(_pools(recorded))
    if not pools:
        told = "no worker was there since the first rollout began; name a scenario whose fleet gets these rollouts"
        raise _refused(name, "workers", told)
    run = _run(recorded, TrainingRun(name="run", trainer=_TRAINER, publish_gbps=_UPLOADED_GBPS))
    scenario = Scenario(
        name=f"{recorded.spec.name}, as recorded",
        hours=_hours(recorded),
        steps=_steps(recorded),
        fleet=tuple(pool.terms for pool in pools),
        run=(run,),
        folder=str(folder),
    )
    spots = {pool.terms.name: pool.trace for pool in pools if pool.trace is not None}
    return _with_work(scenario, recorded, replace(scenario.tables, spots=spots))


def with_recorded_work(recorded: RecordedRun, scenario: Scenario, name: str) -> Scenario:
    """Another fleet, with its trainer, and the recorded rollouts in place of those of its run.

    Raises `FileRefused` naming the scenario's file if it has several runs.
    """
    if len(scenario.run) != 1:
        raise _refused(
            name, "run", f"has {len(scenario.run)} runs; the recorded run takes the place of one, so state one"
        )
    steps = _steps(recorded) if scenario.steps is None else min(scenario.steps, _steps(recorded))
    run, former = _run(recorded, scenario.run[0]), scenario.run[0].name
    fleet = tuple(replace(pool, run=run.name) if pool.run == former else pool for pool in scenario.fleet)
    faults = tuple(replace(one, run=run.name) if one.run == former else one for one in scenario.fault)
    changed = replace(scenario, run=(run,), fleet=fleet, fault=faults, steps=steps)
    return _with_work(changed, recorded, scenario.tables)


def _with_work(scenario: Scenario, recorded: RecordedRun, tables: InputTables) -> Scenario:
    known = {scenario.run[0].name: known_turns(recorded)}
    return replace(scenario, tables=replace(tables, known=known))


def _run(recorded: RecordedRun, like: TrainingRun) -> TrainingRun:
    spec, rows = recorded.spec, recorded.rollouts
    longest = max(prompt + length for prompt, length in zip(rows.prompt, rows.length, strict=True))
    return replace(
        like,
        name=_named(spec.name),
        steps=None,
        prompts=spec.groups_per_step,
        group=spec.group_size,
        max_staleness=spec.max_staleness,
        cap=spec.max_tokens,
        context=max(like.context, longest),
    )


def _steps(recorded: RecordedRun) -> int:
    return len(set(recorded.rollouts.step))


def _hours(recorded: RecordedRun) -> float:
    ended_s = max(recorded.rollouts.end_s)
    length_s = max(recorded.until_s, ended_s) - min(recorded.rollouts.begin_s)
    return min(LONGEST_H, max(_LEAST_H, _PATIENCE * length_s / 3600.0))


def _named(name: str) -> str:
    """A name as scenarios want it."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", name).strip("-_")[:64] or "run"


class _Pool(Struct):
    terms: MachinePool
    trace: SpotTrace | None


def _pools(recorded: RecordedRun) -> Iterator[_Pool]:
    """A pool for each kind and number of slots. Workers of unknown kind count as reserved."""
    alike: dict[tuple[Literal["reserved", "spot"], int], list[RecordedWorker]] = defaultdict(list)
    for worker in recorded.workers:
        if not _spells(recorded, worker):
            continue  # it was gone before the first rollout
        # What a borrowed host served is not recorded: its workers count as spot machines that came and went.
        kind: Literal["reserved", "spot"] = "spot" if worker.kind in {"spot", "borrowed"} else "reserved"
        alike[kind, worker.slots or max(1, worker.most_running)].append(worker)
    for (kind, slots), workers in sorted(alike.items()):
        yield _pool(recorded, f"{kind}-{slots}", kind, slots, workers)


def _pool(
    recorded: RecordedRun,
    name: str,
    kind: Literal["reserved", "spot"],
    slots: int,
    workers: Sequence[RecordedWorker],
) -> _Pool:
    trace = _trace(recorded, workers)
    lost, drained = sum(worker.lost for worker in workers), sum(worker.drained for worker in workers)
    speeds = [worker.speed for worker in workers if worker.speed > 0]
    apart = (max(speeds) - min(speeds)) / (max(speeds) + min(speeds)) if speeds else 0.0
    terms = MachinePool(
        name=name,
        kind=kind,
        engine=_ENGINE,
        workers=None if trace else len(workers),
        trace=SpotTraceSpec(file=name) if trace else None,
        slots=slots,
        boot_s=0.0,  # machines come when their workers attached
        link_gbps=link_gbps(recorded),
        speed_spread=min(_MOST_APART, apart),
        notice_s=_NOTICE_S if drained else 0.0,
        unannounced=lost / (lost + drained) if drained else 0.0,
    )
    return _Pool(terms, trace)


def _trace(recorded: RecordedRun, workers: Sequence[RecordedWorker]) -> SpotTrace | None:
    """The machines' comings and goings since the first step was opened; None if all were there throughout."""
    events = []
    for worker in workers:
        for from_s, until_s in _spells(recorded, worker):
            events.append(TraceEvent(from_s, True, worker.worker))
            if until_s is not None:
                events.append(TraceEvent(until_s, False, worker.worker))
    if all(event.joins and event.at_s == 0.0 for event in events) and len(events) == len(workers):
        return None
    return SpotTrace(events=tuple(sorted(events, key=lambda event: (event.at_s, event.joins, event.node))))


def _spells(recorded: RecordedRun, worker: RecordedWorker) -> list[tuple[float, float | None]]:
    """When a worker was there, in seconds since the first rollout began. Spells of no length are left out."""
    begin_s = min(recorded.rollouts.begin_s)
    since = [(max(0.0, one - begin_s), None if end is None else end - begin_s) for one, end in worker.present]
    return [(from_s, until_s) for from_s, until_s in since if until_s is None or until_s > from_s]


def _refused(file: str, field: str, text: str) -> FileRefused:
    return FileRefused([Problem(file, 1, 0, field, text)])
