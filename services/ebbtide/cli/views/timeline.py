"""Shows which worker generated which rollout when: as a picture, and as JSON for ui.perfetto.dev.

Times are seconds since the run was submitted; in the trace, microseconds. Format: "Trace Event Format", Google 2016.
"""

import asyncio
import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct

from ebbtide.cli.waiting import Waiting
from ebbtide.errors import InvalidRequest
from ebbtide.types.device_turns import HELD, LENT, RETURNING, DeviceTurn, device_turns
from ebbtide.types.run import AttemptSpan, RunEvent, WorkerChange

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ebbtide.client import Client


Event = dict[str, Any]

#: The run's own row, above its workers.
_RUN_PID: Final = 0
_DEVICE_TID: Final = 1
#: What a trainer's devices do in each kind of turn, for people.
OWNERS: Final = {HELD: "trains", LENT: "generates", RETURNING: "returns"}
#: Kinds of events that mark a moment of the whole run.
_OF_RUN: Final = ("version", "rewards")
#: States of a worker that mark a moment, as the run's events name them.
MARKED: Final = (
    WorkerChange.DRAINING,
    WorkerChange.LOST,
    WorkerChange.SUSPECTED,
    WorkerChange.QUARANTINED,
    WorkerChange.LEFT,
    WorkerChange.ATTACHED,
    WorkerChange.WENT_OVER,
)
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
    marks = [event for event in events if event.kind in _OF_RUN or event.worker_change in MARKED]
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
                arrow = {"ph": phase, "id": number, "name": "resumes", "cat": "rollout", "ts": ts}
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
    name = f"{worker} {event.worker_change}"
    return common | {"name": name, "cat": "worker", "s": "p", "pid": pids[worker], "tid": 0}


def version_of(event: RunEvent) -> int:
    """The version that a `version` event announces."""
    return int(event.values.get("version", 0))


_NAME: Final = "timeline"
#: A live run's events do not end. Existing ones come at once, so after this much silence all were read.
_SILENCE_S: Final = 2.0


async def fetch(client: "Client", run_id: str) -> Timeline:
    """Fetches the timeline up to now. Raises `NotFound`."""
    spans = [span async for span in client.timeline(run_id)]
    return make_timeline(run_id, spans, await fetch_events(client, run_id))


async def fetch_events(client: "Client", run_id: str) -> list[RunEvent]:
    """Fetches the run's events up to now. Raises `NotFound`."""
    run = await client.run(run_id)
    events: list[RunEvent] = []
    stream = client.watch(run_id)
    try:
        with Waiting(f"further events of {run_id}") as waiting:
            while True:
                # The first event is the submission: before it, only the coordinator can be silent.
                async with asyncio.timeout(_SILENCE_S if events and not run.status.ended else None):
                    events.append(await anext(stream))
                waiting.heard()
                if not run.status.ended and events[-1].age_s > run.age_s:
                    break
    except (StopAsyncIteration, TimeoutError):
        pass
    finally:
        await stream.aclose()
    return events


def write(timeline: Timeline, directory: Path) -> list[Path]:
    """Writes `timeline.json` and `timeline.png`. Returns their paths. Raises `InvalidRequest`."""
    trace, picture = directory / f"{_NAME}.json", directory / f"{_NAME}.png"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        trace.write_bytes(msgspec.json.encode(chrome_trace(timeline)))
        write_timeline_picture(timeline, picture)
    except OSError as error:
        raise InvalidRequest(f"{str(directory)!r} cannot be written ({error.strerror})", field="--out") from None
    return [trace, picture]


#: Inches. A row takes at least a pixel, up to the height of a page.
_WIDTH: Final = 16.0
_LOWEST: Final = 3.0
_HIGHEST: Final = 24.0
_ROW: Final = 0.09
_GAP: Final = 2.0  # rows between bands
_LABELLED: Final = 30  # versions whose numbers fit above the picture
_NONE: Final = "#c8c8c8"
#: Rows of the band of the trainer's devices, and its colours by who has them.
_DEVICE_ROWS: Final = 4.0
TURN_COLOURS: Final = {HELD: "#9467bd", LENT: "#2ca02c", RETURNING: "#ff7f0e"}
_MARKS: Final = {  # state -> colour, marker
    WorkerChange.LOST: ("#d62728", "X"),
    WorkerChange.SUSPECTED: ("#d62728", "o"),
    WorkerChange.QUARANTINED: ("#ff7f0e", "s"),
    WorkerChange.DRAINING: ("#ff7f0e", "v"),
    WorkerChange.LEFT: ("#7f7f7f", "X"),
    WorkerChange.WENT_OVER: ("#1f77b4", ">"),
}


def write_timeline_picture(timeline: Timeline, path: Path) -> None:
    """Writes a PNG. A bar ends in a red edge if the worker did not finish the rollout."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    offsets, height = _offsets(timeline)
    inches = min(_HIGHEST, max(_LOWEST, 1.5 + _ROW * height))
    figure, axes = plt.subplots(figsize=(_WIDTH, inches), layout="constrained")
    try:
        _draw_bands(axes, timeline, offsets)
        _draw_turns(axes, timeline)
        _draw_spans(axes, timeline, offsets)
        _draw_marks(axes, timeline, offsets)
        axes.set_ylim(height, -_GAP)
        axes.margins(x=0.01)
        axes.set_xlabel("seconds since the run was submitted")
        axes.set_title(_title(timeline), loc="left", pad=18)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, dpi=120)
    finally:
        plt.close(figure)


def _offsets(timeline: Timeline) -> tuple[dict[str, float], float]:
    """Returns worker -> its first row in the picture, and the number of rows."""
    offsets: dict[str, float] = {}
    at = _DEVICE_ROWS + _GAP if timeline.turns else 0.0
    for worker in timeline.lanes:
        offsets[worker] = at
        at += timeline.rows(worker) + _GAP
    return offsets, max(at, 1.0)


def _title(timeline: Timeline) -> str:
    spans = list(timeline.spans)
    cut = sum(not span.finished for span in spans)
    tokens = sum(span.last - span.first for span in spans)
    return (
        f"{timeline.run_id}: {len(spans):,} attempts on {len(timeline.lanes)} workers, {cut:,} of them not finished "
        f"there, {tokens:,} tokens"
    )


def _draw_bands(axes: "Axes", timeline: Timeline, offsets: Mapping[str, float]) -> None:
    middles = [_DEVICE_ROWS / 2] if timeline.turns else []
    for number, worker in enumerate(timeline.lanes):
        rows = timeline.rows(worker)
        middles.append(offsets[worker] + rows / 2)
        if number % 2 == 0:
            axes.axhspan(offsets[worker] - _GAP / 2, offsets[worker] + rows + _GAP / 2, color="#f4f4f4", zorder=0)
    names = [*(["trainer's devices"] if timeline.turns else []), *timeline.lanes]
    axes.set_yticks(middles, names, fontsize=8)
    axes.tick_params(axis="y", length=0)


def _draw_turns(axes: "Axes", timeline: Timeline) -> None:
    """Draws who has the trainer's devices, above all workers."""
    for state, colour in TURN_COLOURS.items():
        spans = [(turn.begin_s, turn.end_s - turn.begin_s) for turn in timeline.turns if turn.state == state]
        if spans:
            label = f"the device {OWNERS[state]}"
            axes.broken_barh(spans, (0.0, _DEVICE_ROWS), facecolors=colour, linewidth=0, zorder=2, label=label)


def _draw_spans(axes: "Axes", timeline: Timeline, offsets: Mapping[str, float]) -> None:
    import matplotlib as mpl
    from matplotlib.collections import LineCollection, PolyCollection

    versions = sorted({span.first_version for span in timeline.spans} - {0})
    # The lightest yellow would not be seen on white.
    scale: Any = mpl.colormaps["viridis"]
    norm = mpl.colors.Normalize(min(versions, default=0), max(max(versions, default=0), min(versions, default=0) + 1))
    boxes, colours, edges = [], [], []
    for worker, lanes in timeline.lanes.items():
        for lane in lanes:
            span, top = lane.span, offsets[worker] + lane.row
            low, high = top + 0.08, top + 0.92
            boxes.append([(span.begin_s, low), (span.end_s, low), (span.end_s, high), (span.begin_s, high)])
            colours.append(scale(0.92 * float(norm(span.first_version))) if span.first_version else _NONE)
            if not span.finished:
                edges.append([(span.end_s, top), (span.end_s, top + 1)])
    axes.add_collection(PolyCollection(boxes, facecolors=colours, edgecolors="none", zorder=2))
    axes.add_collection(LineCollection(edges, colors="#d62728", linewidths=1.2, zorder=3))
    axes.autoscale_view()
    if len(versions) > 1:
        shown = mpl.cm.ScalarMappable(norm, mpl.colors.ListedColormap([scale(0.92 * x / 255) for x in range(256)]))
        ticks = mpl.ticker.MaxNLocator(integer=True)
        label = "policy version of the first token"
        axes.figure.colorbar(shown, ax=axes, label=label, ticks=ticks, pad=0.01, fraction=0.02)


def _draw_marks(axes: "Axes", timeline: Timeline, offsets: Mapping[str, float]) -> None:
    versions = [event for event in timeline.marks if event.kind == "version"]
    for event in versions:
        axes.axvline(event.age_s, color="#1f77b4", linewidth=0.6, alpha=0.6, zorder=1)
        if len(versions) <= _LABELLED:
            axes.text(
                event.age_s, 1.0, f"v{version_of(event)}", transform=axes.get_xaxis_transform(), fontsize=7,
                color="#1f77b4", ha="center", va="bottom",
            )  # fmt: skip
    for state, (colour, marker) in _MARKS.items():
        marked = [event for event in timeline.marks if event.worker_change is state]
        if not marked:
            continue
        for event in marked:
            top = offsets[event.labels["worker"]]
            axes.vlines(event.age_s, top, top + timeline.rows(event.labels["worker"]), color=colour, zorder=4)
        heights = [offsets[event.labels["worker"]] - _GAP / 4 for event in marked]
        at = [event.age_s for event in marked]
        axes.scatter(at, heights, color=colour, marker=marker, s=28, zorder=5, label=state)
    if axes.get_legend_handles_labels()[0]:
        axes.figure.legend(loc="outside lower left", ncols=len(_MARKS) + len(TURN_COLOURS), frameon=False, fontsize=8)
