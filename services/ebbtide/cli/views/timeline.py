"""Lays out a run's attempts in time, and writes them as Chrome trace events for ui.perfetto.dev and chrome://tracing.

Times are seconds since the run was submitted; in the trace, microseconds. Format: "Trace Event Format", Google 2016.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from msgspec import Struct

from ebbtide.claimed_runs.device_turns import HELD, LENT, RETURNING, DeviceTurn, device_turns
from ebbtide.types.run import AttemptSpan, RunEvent

Event = dict[str, Any]

#: The run's own row, above its workers.
_RUN_PID: Final = 0
_DEVICE_TID: Final = 1
#: What a trainer's devices do in each kind of turn, for people.
OWNERS: Final = {HELD: "trains", LENT: "generates", RETURNING: "returns"}
#: Kinds of events that mark a moment of the whole run.
_OF_RUN: Final = ("version", "rewards")
#: States of a worker that mark a moment, as the run's events name them.
MARKED: Final = ("draining", "lost", "suspected", "shunned", "left", "attached", "went_over")
#: Least width of a span: an arrow's ends must lie inside their spans.
_LEAST_US: Final = 2


class Lane(Struct, frozen=True):
    """A span and its row."""

    span: AttemptSpan
    row: int  # of its worker, from 0


class Timeline(Struct, frozen=True):
    run_id: str
    #: worker -> its spans by begin; those of one row do not overlap. Workers are sorted by their first span or event.
    lanes: dict[str, list[Lane]]
    marks: list[RunEvent]  # on workers, versions and cut scorings, in order
    turns: list[DeviceTurn] = []  # of a trainer that lends its devices

    @property
    def spans(self) -> Iterator[AttemptSpan]:
        for lanes in self.lanes.values():
            for lane in lanes:
                yield lane.span

    def rows(self, worker_id: str) -> int:
        return 1 + max((lane.row for lane in self.lanes[worker_id]), default=0)


def make_timeline(run_id: str, spans: Iterable[AttemptSpan], events: Iterable[RunEvent]) -> Timeline:
    """Makes the timeline from a run's spans and events, in any order."""
    events = sorted(events, key=lambda event: event.age_s)
    marks = [event for event in events if event.kind in _OF_RUN or _marks_worker(event)]
    by_worker: dict[str, list[AttemptSpan]] = defaultdict(list)
    end_s = max((event.age_s for event in events), default=0.0)
    for span in spans:
        by_worker[span.worker_id].append(span)
        end_s = max(end_s, span.end_s)
    begins = {worker: min(span.begin_s for span in found) for worker, found in by_worker.items()}
    for event in marks:
        if worker := event.labels.get("worker", ""):
            begins[worker] = min(begins.get(worker, event.age_s), event.age_s)
    order = sorted(begins, key=lambda worker: (begins[worker], worker))
    lanes = {worker: pack(by_worker.get(worker, ())) for worker in order}
    return Timeline(run_id, lanes, marks, device_turns(events, end_s))


def _marks_worker(event: RunEvent) -> bool:
    return event.kind == "worker" and event.labels.get("state") in MARKED and "worker" in event.labels


def pack(spans: Iterable[AttemptSpan]) -> list[Lane]:
    """Puts each span into the lowest row that is free when it begins."""
    free: list[int] = []
    busy: list[tuple[int, int]] = []  # (end, row)
    lanes: list[Lane] = []
    rows = 0
    for span in sorted(spans, key=lambda span: (span.begin_s, span.end_s, span.attempt_id)):
        begin, duration = _microseconds(span)
        while busy and busy[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            row = heapq.heappop(free)
        else:
            row, rows = rows, rows + 1
        heapq.heappush(busy, (begin + duration, row))
        lanes.append(Lane(span, row))
    return lanes


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Returns the trace as JSON values: a process per worker, a thread per row, arrows between a rollout's attempts."""
    pids = {worker: number for number, worker in enumerate(timeline.lanes, start=_RUN_PID + 1)}
    events: list[Event] = [*_named(_RUN_PID, f"run {timeline.run_id}"), *_turns(timeline)]
    for worker, pid in pids.items():
        events += _named(pid, worker)
        events += [_span(pid, lane) for lane in timeline.lanes[worker]]
    events += _arrows(timeline, pids)
    events += [_instant(event, pids) for event in timeline.marks]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"run": timeline.run_id}}


def _turns(timeline: Timeline) -> Iterator[Event]:
    """Shows who has the trainer's devices, as a row of the run itself."""
    if timeline.turns:
        where = {"pid": _RUN_PID, "tid": _DEVICE_TID}
        yield {"ph": "M", "name": "thread_name", "args": {"name": "trainer's devices"}} | where
        for turn in timeline.turns:
            begin, duration = _microseconds(turn)
            shown = {"ph": "X", "name": OWNERS[turn.state], "cat": turn.state, "ts": begin, "dur": duration}
            yield shown | where | {"args": {"state": turn.state}}


def _named(pid: int, name: str) -> list[Event]:
    return [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}},
        {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}},
    ]


def _span(pid: int, lane: Lane) -> Event:
    span = lane.span
    args = {
        "attempt": span.attempt_id,
        "end": span.end,
        "tokens": span.last - span.first,
        "first_token": span.first,
        "last_token": span.last,
        "versions": sorted({span.first_version, span.last_version} - {0}),
    }
    begin, duration = _microseconds(span)
    return {
        "ph": "X", "name": span.rollout_id, "cat": "finished" if span.finished else "cut",
        "pid": pid, "tid": lane.row + 1, "ts": begin, "dur": duration, "args": args,
    }  # fmt: skip


def _microseconds(span: AttemptSpan | DeviceTurn) -> tuple[int, int]:
    begin, end = round(span.begin_s * 1e6), round(span.end_s * 1e6)
    return begin, max(_LEAST_US, end - begin)


def _arrows(timeline: Timeline, pids: Mapping[str, int]) -> Iterator[Event]:
    number = 0
    for chain in chains(timeline).values():
        for source, target in pairwise(chain):
            number += 1
            begin, duration = _microseconds(source.span)
            for phase, ts, lane in (("s", begin + duration - 1, source), ("f", _microseconds(target.span)[0], target)):
                arrow = {"ph": phase, "id": number, "name": "goes on", "cat": "rollout", "ts": ts}
                where = {"pid": pids[lane.span.worker_id], "tid": lane.row + 1}
                yield arrow | where | ({"bp": "e"} if phase == "f" else {})


def chains(timeline: Timeline) -> dict[str, Sequence[Lane]]:
    """rollout -> its attempts, first to last, for rollouts with several."""
    found: dict[str, list[Lane]] = defaultdict(list)
    for lanes in timeline.lanes.values():
        for lane in lanes:
            found[lane.span.rollout_id].append(lane)
    return {
        rollout: sorted(lanes, key=lambda lane: (lane.span.begin_s, lane.span.first))
        for rollout, lanes in found.items()
        if len(lanes) > 1
    }


def _instant(event: RunEvent, pids: Mapping[str, int]) -> Event:
    common = {"ph": "i", "ts": round(event.age_s * 1e6), "args": {"message": event.message, **event.values}}
    if event.kind == "version":
        return common | {"name": f"version {version_of(event)}", "cat": "version", "s": "g", "pid": _RUN_PID, "tid": 0}
    if event.kind == "rewards":
        return common | {"name": "scored out of time", "cat": "rewards", "s": "g", "pid": _RUN_PID, "tid": 0}
    worker = event.labels["worker"]
    name = f"{worker} {event.labels['state']}"
    return common | {"name": name, "cat": "worker", "s": "p", "pid": pids[worker], "tid": 0}


def version_of(event: RunEvent) -> int:
    """The version that a `version` event announces."""
    return int(event.values.get("version", 0))
