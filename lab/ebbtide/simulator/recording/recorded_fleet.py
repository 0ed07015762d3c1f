"""Tells from a run's attempts and events which workers it had, from when to when."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

from msgspec import Struct

from ebbtide.simulator.recording.attempt_speeds import WorkerLoad, measured_engine, relative_speed
from ebbtide.simulator.recording.recorded_run import MeasuredEngine, RecordedWorker
from ebbtide.types.fleet import Worker, WorkerKind
from ebbtide.types.run import AttemptSpan, RunEvent

#: States in the run's events with which a worker is gone.
_ENDS: Final = frozenset({"left", "lost", "suspected"})
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
        presence = found.get(event.labels.get("worker", "")) if event.kind == "worker" else None
        if presence is None:
            continue
        if event.labels.get("state") == "attached":
            presence.came(event.age_s)
        elif event.labels.get("state") in _ENDS:
            presence.went(event.age_s, drained=event.labels["state"] == "left")
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
