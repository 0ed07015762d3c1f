"""A run's timeline: a trace that Perfetto and Chrome load, and a picture that stays legible."""

import json
import struct
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ebbtide.cli.views.timeline import Timeline, chains, chrome_trace, fetch, make_timeline, pack, write
from ebbtide.errors import InvalidRequest
from ebbtide.types.device_turns import HELD, LENT, device_event
from ebbtide.types.fleet import EndCause
from ebbtide.types.run import AttemptSpan, EnvironmentSpec, Run, RunEvent, RunSpec, RunStatus

SPEC = RunSpec(name="demo", model="m", environment=EnvironmentSpec(name="e"))


def span(rollout: str, worker: str, begin: float, until: float, **more: Any) -> AttemptSpan:
    fields: dict[str, Any] = {
        "cursor": "", "rollout_id": rollout, "attempt_id": f"{rollout}.{worker}.{begin}", "worker_id": worker,
        "first": 0, "last": 10, "begin_s": begin, "end_s": until, "end": "finished", "cause": EndCause.FINISHED,
        "first_version": 1, "last_version": 1,
    }  # fmt: skip
    return AttemptSpan(**(fields | more))


def worker_event(worker: str, state: str, at: float) -> RunEvent:
    labels = {"worker": worker, "state": state}
    return RunEvent(kind="worker", message=f"{worker} {state}", labels=labels, values={"rollouts": 2.0}, age_s=at)


def version(number: int, at: float) -> RunEvent:
    return RunEvent(kind="version", key=str(number), values={"version": float(number)}, age_s=at)


SPANS = [
    span("a", "w1", 1.0, 4.0, last=20, end="worker lost: its stream broke", cause=EndCause.WORKER_LOST),
    span("a", "w2", 4.5, 9.0, first=16, last=40, last_version=2),
    span("b", "w1", 1.0, 3.0),
    span("c", "w1", 3.0, 4.0),
]
EVENTS = [version(1, 0.5), version(2, 5.0), worker_event("w1", "lost", 4.0), worker_event("w3", "attached", 6.0)]


@pytest.fixture
def timeline() -> Timeline:
    return make_timeline("r", reversed(SPANS), [*reversed(EVENTS), RunEvent(kind="step", age_s=5.5)])


def events(timeline: Timeline, phase: str) -> list[dict[str, Any]]:
    trace = json.loads(json.dumps(chrome_trace(timeline)))
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def many(count: int, workers: int = 8) -> list[AttemptSpan]:
    random = Random(7)
    made = []
    for number in range(count):
        begin = random.uniform(0, 600)
        worker, ends = f"worker-{random.randrange(workers)}", random.random() > 0.1
        end = "finished" if ends else "worker lost"
        more = {"end": end, "first_version": 1 + int(begin // 60), "last_version": 2 + int(begin // 60)}
        made.append(span(f"r{number // 2}", worker, begin, begin + random.lognormvariate(1.5, 1), **more))
    return made


def test_spans_of_one_row_never_overlap_and_rows_are_as_few_as_can_be() -> None:
    spans = many(2000, workers=1)
    lanes = pack(spans)
    rows: dict[int, list[AttemptSpan]] = {}
    for lane in lanes:
        rows.setdefault(lane.row, []).append(lane.span)
    for row in rows.values():
        assert all(before.end_s <= after.begin_s + 1e-6 for before, after in pairwise(row))
    moments = sorted([(one.begin_s, 1) for one in spans] + [(one.end_s, -1) for one in spans])
    most = running = 0
    for _, change in moments:
        running += change
        most = max(most, running)
    assert len(rows) == most
    assert len(lanes) == len(spans)


def test_a_trainer_that_lends_its_devices_has_a_row_of_who_has_them(tmp_path: Path) -> None:
    turns = [device_event(LENT, key="a", ago_s=0.0), device_event(HELD, key="b", ago_s=0.0, return_s=1.0)]
    told = [
        RunEvent(kind=one.kind, values=one.values, labels=one.labels, age_s=at)
        for one, at in zip(turns, (2.0, 6.0), strict=True)
    ]
    made = make_timeline("r", SPANS, [*EVENTS, *told])
    row = [one for one in events(made, "X") if one["pid"] == 0]
    shown = [(one["name"], one["ts"], one["dur"]) for one in row]
    assert shown == [
        ("generates", 2_000_000, 3_000_000),
        ("returns", 5_000_000, 1_000_000),
        ("trains", 6_000_000, 3_000_000),
    ]
    (name,) = [one for one in events(made, "M") if one["name"] == "thread_name"]
    assert (name["pid"], name["tid"], name["args"]["name"]) == (0, row[0]["tid"], "trainer's devices")
    assert all(path.stat().st_size for path in write(made, tmp_path))


def test_each_worker_is_a_process_and_each_attempt_a_span_with_what_is_known_of_it(timeline: Timeline) -> None:
    names = {event["pid"]: event["args"]["name"] for event in events(timeline, "M") if event["name"] == "process_name"}
    assert list(names.values()) == ["run r", "w1", "w2", "w3"]
    spans = events(timeline, "X")
    assert sorted((names[one["pid"]], one["name"], one["ts"], one["dur"]) for one in spans) == [
        ("w1", "a", 1_000_000, 3_000_000),
        ("w1", "b", 1_000_000, 2_000_000),
        ("w1", "c", 3_000_000, 1_000_000),
        ("w2", "a", 4_500_000, 4_500_000),
    ]
    (second,) = [one for one in spans if names[one["pid"]] == "w2"]
    assert second["args"] == {
        "attempt": "a.w2.4.5", "end": "finished", "tokens": 24, "first_token": 16, "last_token": 40, "versions": [1, 2],
    }  # fmt: skip
    (cut,) = [one for one in spans if one["cat"] == "cut"]
    assert cut["args"]["end"] == "worker lost: its stream broke"
    assert {one["tid"] for one in spans if names[one["pid"]] == "w1"} == {1, 2}


def test_a_quarantine_is_marked_also_where_an_earlier_coordinator_stored_it(tmp_path: Path) -> None:
    changes = [worker_event("w1", "shunned", 2.0), worker_event("w1", "quarantined", 3.0)]
    made = make_timeline("r", SPANS, [*changes, worker_event("w1", "a change of tomorrow", 4.0)])
    assert [one["name"] for one in events(made, "i")] == ["w1 quarantined", "w1 quarantined"]
    assert all(path.stat().st_size for path in write(made, tmp_path))


def test_an_arrow_leads_from_each_attempt_of_a_rollout_to_the_next(timeline: Timeline) -> None:
    (start,), (end,) = events(timeline, "s"), events(timeline, "f")
    by_name = {(one["name"], one["pid"]): one for one in events(timeline, "X")}
    for arrow in (start, end):
        inside = by_name["a", arrow["pid"]]
        assert inside["ts"] <= arrow["ts"] < inside["ts"] + inside["dur"]
        assert arrow["tid"] == inside["tid"]
    assert (start["id"], start["name"], start["cat"], end["bp"]) == (end["id"], end["name"], end["cat"], "e")
    assert start["ts"] < end["ts"]


def test_losses_and_versions_are_instants_on_their_worker_or_over_all(timeline: Timeline) -> None:
    told = {event["name"]: event for event in events(timeline, "i")}
    assert set(told) == {"version 1", "version 2", "w1 lost", "w3 attached"}
    assert (told["version 2"]["s"], told["version 2"]["ts"]) == ("g", 5_000_000)
    lost = told["w1 lost"]
    assert (lost["s"], lost["ts"], lost["args"]) == ("p", 4_000_000, {"message": "w1 lost", "rollouts": 2.0})
    assert lost["pid"] == events(timeline, "X")[0]["pid"]


def test_attempts_of_one_rollout_are_in_their_order(timeline: Timeline) -> None:
    assert [[lane.span.worker_id for lane in chain] for chain in chains(timeline).values()] == [["w1", "w2"]]


def test_a_span_of_no_length_still_has_a_width(timeline: Timeline) -> None:
    none = make_timeline("r", [span("a", "w1", 1.0, 1.0), span("a", "w2", 1.0, 1.0)], [])
    assert min(event["dur"] for event in events(none, "X")) > 0
    for arrow, (begin, width) in zip(events(none, "s") + events(none, "f"), [(1e6, 2)] * 2, strict=True):
        assert begin <= arrow["ts"] < begin + width


def test_five_thousand_spans_make_a_picture_of_bounded_size(tmp_path: Path) -> None:
    marks = [version(number, number * 60.0) for number in range(1, 10)]
    marks += [
        worker_event(f"worker-{number}", state, 100.0 * number) for number in (1, 3) for state in ("lost", "left")
    ]
    trace, picture = write(make_timeline("r", many(5000), marks), tmp_path / "new" / "folder")
    assert len([one for one in json.loads(trace.read_bytes())["traceEvents"] if one["ph"] == "X"]) == 5000
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    assert (width, height <= 24 * 120) == (16 * 120, True)


@pytest.mark.parametrize("marks", [[], EVENTS])
def test_a_run_without_any_attempt_has_a_timeline_too(tmp_path: Path, marks: list[RunEvent]) -> None:
    for path in write(make_timeline("r", [], marks), tmp_path):
        assert path.stat().st_size > 0


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path, timeline: Timeline) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequest, match="cannot be written") as refusal:
        write(timeline, tmp_path / "file")
    assert refusal.value.field == "--out"


class Told:
    """Stands for a client of a run whose events go on for ever, unless it has ended."""

    def __init__(self, status: RunStatus, *, age_s: float) -> None:
        self._run = Run(run_id="r", spec=SPEC, status=status, age_s=age_s)

    async def run(self, run_id: str) -> Run:
        return self._run

    async def timeline(self, run_id: str) -> Any:
        for one in SPANS:
            yield one

    async def watch(self, run_id: str) -> Any:
        yield RunEvent(kind="status")
        for event in EVENTS:
            yield event
        while not self._run.status.ended:
            yield version(99, 1000.0)


@pytest.mark.parametrize("status", [RunStatus.RUNNING, RunStatus.FINISHED])
async def test_the_timeline_of_a_live_run_ends_with_the_present(status: RunStatus) -> None:
    timeline = await fetch(Told(status, age_s=10.0), "r")  # type: ignore[arg-type]
    assert len(list(timeline.spans)) == 4
    assert [mark.kind for mark in timeline.marks][:4] == ["version", "worker", "version", "worker"]
    assert len(timeline.marks) == 4 + (status is RunStatus.RUNNING)
