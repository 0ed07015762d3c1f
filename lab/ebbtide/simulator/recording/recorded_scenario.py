"""Makes a scenario of a recorded run: its fleet, its work, and profiles fitted to it."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from ebbtide.checked_files import FileRefused, Problem
from ebbtide.simulator.engines.engine_profile import EngineDelays, EngineProfile, FitErrors, KvCapacity, StepCosts
from ebbtide.simulator.engines.profile_files import write_profile
from ebbtide.simulator.engines.trainer_profile import TrainerCosts, TrainerDelays, TrainerProfile
from ebbtide.simulator.recording.recorded_run import (
    MeasuredEngine,
    RecordedRun,
    RecordedStep,
    RecordedWorker,
    RolloutColumns,
)
from ebbtide.simulator.scenario.input_tables import InputTables, KnownTurn, KnownTurns, SpotTrace, TraceEvent
from ebbtide.simulator.scenario.machine_pool import MachinePool, SpotTraceSpec
from ebbtide.simulator.scenario.scenario import LONGEST_H, Scenario
from ebbtide.simulator.scenario.training_run import TrainingRun
from ebbtide.simulator.scenario_figures import quantile


def known_turns(recorded: RecordedRun) -> KnownTurns:
    """Returns the turns of each sample of each recorded step.

    Between two turns passes what passed then, from the end of a response to the next turn's placement. So the wait for
    a worker is in it. Prompts of unknown length have one token. A response has at least one.
    """
    rows = recorded.rollouts
    steps: dict[int, dict[int, dict[int, list[int]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for row, (step, group, episode) in enumerate(zip(rows.step, rows.group, rows.episode, strict=True)):
        steps[step][group][episode].append(row)
    return KnownTurns(
        steps=tuple(
            tuple(tuple(_turns(rows, found) for found in episodes.values()) for episodes in groups.values())
            for _, groups in sorted(steps.items())
        )
    )


def _turns(rows: RolloutColumns, found: list[int]) -> tuple[KnownTurn, ...]:
    ordered = sorted(found, key=lambda row: rows.turn[row])
    waits = [max(0.0, rows.begin_s[after] - rows.end_s[before]) for before, after in pairwise(ordered)]
    return tuple(
        KnownTurn(max(1, rows.prompt[row]), max(1, rows.length[row]), wait_s)
        for row, wait_s in zip(ordered, [*waits, 0.0], strict=True)
    )


_UNKNOWN: Final = "recorded"
#: Whether memory for keys and values held rollouts back is in the measured pace, and must not count twice.
_NO_LIMIT: Final = 1 << 40
#: Of machines of whose pulls nothing is known: a scenario's default.
_LINK_GBPS: Final = 50.0
_GBIT_PER_BYTE: Final = 8e-9


def link_gbps(recorded: RecordedRun) -> float:
    """The link over which the bytes of a version came in the time of a pull, both in the median."""
    pull_s, sent = _pull_s(recorded), recorded.weights.sent
    return min(1e5, max(1e-3, sent * _GBIT_PER_BYTE / pull_s)) if pull_s and sent else _LINK_GBPS


def _pull_s(recorded: RecordedRun) -> float:
    return quantile([install.pull_s for install in recorded.installs], 0.5) or 0.0


def engine_of(recorded: RecordedRun, engine: MeasuredEngine) -> EngineProfile:
    """The engine whose rollouts get tokens at the recorded pace. Prefill, and waits inside the engine, are in it."""
    pauses = [install.pause_s for install in recorded.installs]
    return EngineProfile(
        name=f"{recorded.spec.name}-engine",
        model=_UNKNOWN,
        device=_UNKNOWN,
        gpus=0,
        source=f"{engine.attempts} attempts of a recorded run",
        costs=StepCosts(base_s=engine.base_s, sequence_s=engine.rollout_s),
        kv=KvCapacity(tokens=_NO_LIMIT, prefix_cache=False),
        sequences=_NO_LIMIT,
        batched_tokens=_NO_LIMIT,
        weights_gb=recorded.weights.dense / 1e9,
        delays=EngineDelays(install_s=quantile(pauses, 0.5) or 0.0),
        errors=_errors(engine),
    )


def trainer_of(recorded: RecordedRun) -> TrainerProfile:
    """The trainer that takes as long per token, and from there to the announcement, as the recorded one."""
    rows, weights = recorded.rollouts, recorded.weights
    works = list(_works(recorded.steps))
    trained = {step.step for step, _, _ in works}
    tokens = sum(
        prompt + length
        for step, prompt, length in zip(rows.step, rows.prompt, rows.length, strict=True)
        if step in trained
    )
    checkpoints = [step.checkpoint_s for step, _, _ in works if step.checkpoint_s]
    return TrainerProfile(
        name=f"{recorded.spec.name}-trainer",
        model=_UNKNOWN,
        device=_UNKNOWN,
        gpus=0,
        source=f"{len(works)} steps of a recorded run",
        costs=TrainerCosts(token_s=sum(learn_s for _, learn_s, _ in works) / max(1, tokens)),
        micro_batch_tokens=1,  # each sample alone, so that padding, which the record has in its time, costs nothing
        weights_gb=weights.dense / 1e9,
        patch_share=min(1.0, weights.sent / weights.dense) if weights.dense else 1.0,
        delays=TrainerDelays(
            publish_s=quantile([publish_s for _, _, publish_s in works], 0.5) or 0.0,
            checkpoint_s=quantile(checkpoints, 0.5) or 0.0,
        ),
    )


def _works(steps: list[RecordedStep]) -> Iterator[tuple[RecordedStep, float, float]]:
    """Each step with the seconds of learning, and those from there to the announcement of its version.

    The trainer begins when the step's rollouts have ended and the step before is announced. What it did not report as
    learning is the way to the announcement; without a report all of it is learning.
    """
    before = [0.0, *(step.announced_s for step, _ in pairwise(steps))]
    for step, free_s in zip(steps, before, strict=True):
        whole_s = max(0.0, step.announced_s - max(step.generated_s, free_s))
        learn_s = min(step.train_s or whole_s, whole_s)
        yield step, learn_s, whole_s - learn_s


def _errors(engine: MeasuredEngine) -> FitErrors:
    return FitErrors(
        observations=engine.attempts, median=engine.error_median, p90=engine.error_p90, worst=engine.error_worst
    )


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
