"""Makes a record of a live run from its events and rollouts: steps, rollouts, workers, and the speeds of attempts."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Final, Literal, NamedTuple

from msgspec import Struct

from ebbtide.errors import NotReady
from ebbtide.simulator.recording.recorded_run import (
    LeftOut,
    MeasuredEngine,
    RecordedInstall,
    RecordedRun,
    RecordedSpec,
    RecordedStep,
    RecordedWorker,
    RolloutColumns,
    WeightSizes,
)
from ebbtide.simulator.scenario_figures import quantile
from ebbtide.types.fleet import Worker, WorkerKind
from ebbtide.types.run import AttemptSpan, BatchSpec, Run, RunEvent, WorkerChange

#: Shorter attempts say more of flushes than of the engine: a flush window is 32 tokens by default.
_LEAST_TOKENS: Final = 32


class AttemptPace(NamedTuple):
    """One attempt's seconds per token, while `running` attempts ran beside and with it on average."""

    seconds: float
    running: float
    tokens: int


class WorkerLoad:
    """How many attempts ran on a worker at each moment."""

    def __init__(self, spans: Iterable[AttemptSpan]) -> None:
        self._spans = [span for span in spans if span.end_s > span.begin_s]
        changes = sorted([(one.begin_s, 1) for one in self._spans] + [(one.end_s, -1) for one in self._spans])
        self._times = [at for at, _ in changes]
        self._counts = list(accumulate(by for _, by in changes))
        areas = (count * (after - at) for (at, after), count in zip(pairwise(self._times), self._counts, strict=False))
        self._areas = [0.0, *accumulate(areas)]

    @property
    def most(self) -> int:
        return max(self._counts, default=0)

    @property
    def generating_s(self) -> float:
        """Seconds in which at least one attempt ran."""
        steps = zip(pairwise(self._times), self._counts, strict=False)
        return sum(after - at for (at, after), count in steps if count)

    @property
    def rollout_s(self) -> float:
        return sum(one.end_s - one.begin_s for one in self._spans)

    def mean(self, begin_s: float, end_s: float) -> float:
        """How many ran on average between two moments."""
        return (self._area(end_s) - self._area(begin_s)) / (end_s - begin_s)

    def paces(self) -> list[AttemptPace]:
        """Of the attempts that made enough tokens."""
        found = []
        for span in self._spans:
            tokens, seconds = span.last - span.first, span.end_s - span.begin_s
            if tokens >= _LEAST_TOKENS:
                found.append(AttemptPace(seconds / tokens, self.mean(span.begin_s, span.end_s), tokens))
        return found

    def _area(self, at: float) -> float:
        index = bisect_right(self._times, at) - 1
        if index < 0:
            return 0.0
        return self._areas[index] + self._counts[index] * (at - self._times[index])


def measured_engine(loads: Mapping[str, WorkerLoad]) -> MeasuredEngine | None:
    """Fits one engine to the attempts of all workers."""
    paces = [pace for load in loads.values() for pace in load.paces()]
    if not paces:
        return None
    base_s, rollout_s = _line(paces)
    errors = [abs(base_s + rollout_s * pace.running - pace.seconds) / pace.seconds for pace in paces]
    return MeasuredEngine(
        base_s=base_s,
        rollout_s=rollout_s,
        attempts=len(paces),
        error_median=quantile(errors, 0.5) or 0.0,
        error_p90=quantile(errors, 0.9) or 0.0,
        error_worst=max(errors),
    )


def relative_speed(load: WorkerLoad, engine: MeasuredEngine | None) -> float:
    """How many times as fast as the fitted engine a worker was; 1 where nothing was measured."""
    paces = load.paces()
    if engine is None or not paces:
        return 1.0
    expected = sum(pace.tokens * (engine.base_s + engine.rollout_s * pace.running) for pace in paces)
    return expected / sum(pace.tokens * pace.seconds for pace in paces)


def _line(paces: Sequence[AttemptPace]) -> tuple[float, float]:
    """Least squares of `base + slope * running`, weighted by tokens, with neither below 0."""
    weight = sum(pace.tokens for pace in paces)
    x = sum(pace.tokens * pace.running for pace in paces) / weight
    y = sum(pace.tokens * pace.seconds for pace in paces) / weight
    spread = sum(pace.tokens * (pace.running - x) ** 2 for pace in paces)
    both = sum(pace.tokens * (pace.running - x) * (pace.seconds - y) for pace in paces)
    slope = both / spread if spread > 0 else 0.0
    base = y - slope * x
    if slope < 0:
        return y, 0.0
    if base < 0:
        squares = sum(pace.tokens * pace.running**2 for pace in paces)
        return 0.0, sum(pace.tokens * pace.running * pace.seconds for pace in paces) / squares
    return base, slope


_NOTHING: Final[Mapping[str, float]] = {}


class StepTimes(Struct, frozen=True):
    """Announcements and reports by step. A version's step counts the optimiser steps behind it."""

    announced: dict[int, float]  # step -> when the first version behind so many steps was announced
    reports: dict[int, dict[str, float]]  # step -> what the trainer said of it, counted as versions are

    def opened_s(self, step: int, max_staleness: int) -> float | None:
        """When a step's rollouts could be submitted; None if the version for that was never announced."""
        return self.announced.get(max(0, step - max_staleness))

    def over(self, step: int) -> bool:
        """Whether a version, or the trainer's report, shows that the step was trained."""
        return any(later > step for later in (*self.announced, *self.reports))

    def recorded(self, step: int, max_staleness: int, generated_s: float) -> RecordedStep | None:
        """The step's record; None if its begin or its end was not announced."""
        opened_s, announced_s = self.opened_s(step, max_staleness), self.announced.get(step + 1)
        if opened_s is None or announced_s is None:
            return None
        report = self.reports.get(step + 1, _NOTHING)
        return RecordedStep(
            step=step,
            opened_s=opened_s,
            generated_s=generated_s,
            announced_s=announced_s,
            # A simulated trainer begins when all groups are there, so what streaming did before is left out.
            train_s=report.get("seconds_train", 0.0) - report.get("overlapped_s", 0.0),
            publish_s=report.get("seconds_publish", 0.0),
            checkpoint_s=report.get("seconds_checkpoint", 0.0),
        )

    def weights(self) -> WeightSizes:
        """Bytes of a version, in the median of what the trainer reported."""
        dense, sent = (
            quantile([one[name] for one in self.reports.values() if one.get(name)], 0.5)
            for name in ("publish_dense_bytes", "publish_bytes")
        )
        return WeightSizes(dense=round(dense or 0), sent=round(sent or 0))


def step_times(events: Iterable[RunEvent]) -> StepTimes:
    """Reads `version` and `step` events, in any order. A step that was trained again has its last report."""
    announced: dict[int, float] = {}
    reports: dict[int, dict[str, float]] = {}
    for event in sorted(events, key=lambda event: event.age_s):
        if "step" not in event.values:
            continue
        step = int(event.values["step"])
        if event.kind == "version":
            announced.setdefault(step, event.age_s)
        elif event.kind == "step":
            reports[step] = event.values
    return StepTimes(announced, reports)


def installs(events: Iterable[RunEvent]) -> list[RecordedInstall]:
    """Reads `installed` events."""
    return [
        RecordedInstall(
            worker=event.labels["worker"],
            version=int(event.values["version"]),
            at_s=event.age_s,
            pull_s=event.values["pull_s"],
            pause_s=event.values["pause_s"],
        )
        for event in events
        if event.kind == "installed"
        and {"version", "pull_s", "pause_s"} <= event.values.keys()
        and "worker" in event.labels
    ]


class _Rollout(NamedTuple):
    step: int
    group: str
    episode: str
    spans: list[AttemptSpan]  # in their order; the last one finished it

    @property
    def last(self) -> AttemptSpan:
        return self.spans[-1]


class GatheredRollouts(NamedTuple):
    columns: RolloutColumns
    generated_s: dict[int, float]  # step -> when its last rollout ended
    left_out: LeftOut


def gather_rollouts(
    spans: Iterable[AttemptSpan], times: StepTimes, batch: BatchSpec, *, ended: bool, trimmed: bool
) -> GatheredRollouts:
    """Gathers the training rollouts of whole steps.

    `ended`: the run is over, and so is its last step. `trimmed`: the store no longer has the oldest attempts. Rollouts
    that were submitted without a step belong to steps of `groups_per_step` groups, in the order of their begin.
    """
    by_rollout: dict[str, list[AttemptSpan]] = defaultdict(list)
    evaluation, first_end_s = set[str](), 0.0
    for span in spans:
        if not by_rollout and not evaluation:
            first_end_s = span.end_s
        if span.evaluation:
            evaluation.add(span.rollout_id)
        else:
            by_rollout[span.rollout_id].append(span)
    rollouts = _placed({name: sorted(found, key=_order) for name, found in by_rollout.items()}, batch)
    whole = {
        step
        for step in {one.step for one in rollouts}
        if (ended or times.over(step)) and not (trimmed and _cut(step, times, batch, first_end_s))
    }
    kept = [one for one in rollouts if one.step in whole and one.last.finished]
    unfinished = sum(not one.last.finished for one in rollouts)
    left_out = LeftOut(
        evaluation=len(evaluation), unfinished=unfinished, of_partial_steps=len(rollouts) - unfinished - len(kept)
    )
    generated_s: dict[int, float] = defaultdict(float)
    for one in kept:
        generated_s[one.step] = max(generated_s[one.step], one.last.end_s)
    return GatheredRollouts(_columns(kept), dict(generated_s), left_out)


def _order(span: AttemptSpan) -> tuple[float, int]:
    return span.begin_s, span.first


def _cut(step: int, times: StepTimes, batch: BatchSpec, first_end_s: float) -> bool:
    """Whether attempts of the step may have ended before the oldest one that is left."""
    opened_s = times.opened_s(step, batch.max_staleness)
    return opened_s is None or opened_s < first_end_s


def _placed(by_rollout: Mapping[str, Sequence[AttemptSpan]], batch: BatchSpec) -> list[_Rollout]:
    """Rollouts with their steps, ordered by step, group, episode and turn; groups and episodes by their begin."""
    groups: dict[str, list[_Rollout]] = defaultdict(list)
    for name, found in by_rollout.items():
        span = found[-1]
        group = span.group_id or name
        groups[group].append(_Rollout(-1 if span.step is None else span.step, group, span.episode_id or name, [*found]))
    placed, begun, samples = list[_Rollout](), 0, batch.groups_per_step * batch.group_size
    for group in sorted(groups, key=lambda group: (_begin(groups[group]), group)):
        members = groups[group]
        step = members[0].step
        if step < 0:
            step = begun // samples
            begun += batch.group_size if members[0].last.group_id else 1
        placed += [one._replace(step=step) for one in members]
    first = {name: index for index, name in enumerate(groups)}
    begins = {group: _begin(found) for group, found in groups.items()}
    return sorted(placed, key=lambda one: (one.step, begins[one.group], first[one.group], one.episode, one.last.turn))


def _begin(rollouts: Iterable[_Rollout]) -> float:
    return min(one.spans[0].begin_s for one in rollouts)


def _columns(rollouts: Sequence[_Rollout]) -> RolloutColumns:
    groups = _numbers(one.group for one in rollouts)
    episodes = _numbers(one.episode for one in rollouts)
    return RolloutColumns(
        step=[one.step for one in rollouts],
        group=[groups[one.group] for one in rollouts],
        episode=[episodes[one.episode] for one in rollouts],
        turn=[one.last.turn for one in rollouts],
        prompt=[one.last.prompt_tokens for one in rollouts],
        length=[one.last.last for one in rollouts],
        attempts=[len(one.spans) for one in rollouts],
        begin_s=[one.spans[0].begin_s for one in rollouts],
        end_s=[one.last.end_s for one in rollouts],
    )


def _numbers(names: Iterable[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(dict.fromkeys(names))}


#: States in the run's events with which a worker is gone.
_ENDS: Final = frozenset({WorkerChange.LEFT, WorkerChange.LOST, WorkerChange.SUSPECTED})
_KINDS: Final[dict[WorkerKind, Literal["reserved", "spot", "borrowed"]]] = {
    WorkerKind.RESERVED: "reserved",
    WorkerKind.SPOT: "spot",
    WorkerKind.BORROWED: "borrowed",
}


class _Presence(Struct):
    spells: list[tuple[float, float | None]] = []
    lost: int = 0
    drained: int = 0

    def came(self, at_s: float) -> None:
        if not self.spells or self.spells[-1][1] is not None:
            self.spells.append((at_s, None))

    def went(self, at_s: float, *, drained: bool) -> None:
        self.came(0.0)  # without a word of its coming, it was there before the run
        self.spells[-1] = (self.spells[-1][0], at_s)
        self.drained += drained
        self.lost += not drained


def record_fleet(
    spans: Iterable[AttemptSpan], events: Iterable[RunEvent], listed: Iterable[Worker]
) -> tuple[list[RecordedWorker], MeasuredEngine | None]:
    """Returns the workers that served the run, or were ready to, by name, and the engine fitted to their attempts.

    A worker without an event of its coming was there at the run's begin: events go to the runs that live. Kind and
    slots are known of workers that the coordinator still lists.
    """
    events, by_worker = list(events), defaultdict[str, list[AttemptSpan]](list)
    for span in spans:
        by_worker[span.worker_id].append(span)
    for event in events:
        if event.kind == "installed" and "worker" in event.labels:
            by_worker.setdefault(event.labels["worker"], [])  # it was ready for the run, and got no rollout
    loads = {worker: WorkerLoad(found) for worker, found in by_worker.items()}
    engine = measured_engine(loads)
    presences, known = _presences(events, by_worker), {worker.worker_id: worker for worker in listed}
    return [
        _recorded(name, loads[name], engine, presences[name], by_worker[name], known.get(name))
        for name in sorted(loads)
    ], engine


def _presences(events: Iterable[RunEvent], by_worker: Mapping[str, list[AttemptSpan]]) -> dict[str, _Presence]:
    found = {worker: _Presence() for worker in by_worker}
    for event in sorted(events, key=lambda event: event.age_s):
        change, presence = event.worker_change, found.get(event.labels.get("worker", ""))
        if presence is None:
            continue
        if change is WorkerChange.ATTACHED:
            presence.came(event.age_s)
        elif change in _ENDS:
            presence.went(event.age_s, drained=change is WorkerChange.LEFT)
    for presence in found.values():
        if not presence.spells:
            presence.came(0.0)
    return found


def _recorded(
    name: str,
    load: WorkerLoad,
    engine: MeasuredEngine | None,
    presence: _Presence,
    spans: Sequence[AttemptSpan],
    listed: Worker | None,
) -> RecordedWorker:
    spells = presence.spells
    # Attempts of a lost worker end a little after its loss; one that begins then shows that it came back unheard.
    if spells[-1][1] is not None and any(span.begin_s > spells[-1][1] for span in spans):
        spells = [*spells[:-1], (spells[-1][0], None)]
    if spells[-1][1] is None and listed is None:  # it is not there any more, and nobody said when it went
        spells = [*spells[:-1], (spells[-1][0], max((span.end_s for span in spans), default=spells[-1][0]))]
    return RecordedWorker(
        worker=name,
        kind=_KINDS[listed.kind] if listed else "",
        slots=listed.slots if listed else 0,
        most_running=load.most,
        present=spells,
        lost=presence.lost,
        drained=presence.drained,
        tokens=sum(span.last - span.first for span in spans),
        generating_s=load.generating_s,
        rollout_s=load.rollout_s,
        speed=relative_speed(load, engine),
    )


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
