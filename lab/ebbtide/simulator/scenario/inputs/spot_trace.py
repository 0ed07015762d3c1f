"""Reads spot traces: which machines of a recorded fleet were there from when to when."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Final

from msgspec import Struct

from ebbtide.simulator.scenario.inputs.csv_rows import CsvRows, read_rows, rising

#: More machines than any trace has.
_MOST: Final = 20_000
#: Arrivals and losses of a file of counts.
_MOST_CHANGES: Final = 1_000_000
_JOINS: Final = {"add": True, "remove": False}


class TraceEvent(Struct, frozen=True, gc=False):
    at_s: float
    joins: bool
    node: str


class SpotTrace(Struct, frozen=True):
    """A recorded fleet, either of named machines or of how many there were. One of the two is empty."""

    events: tuple[TraceEvent, ...] = ()
    counts: tuple[tuple[float, int], ...] = ()  # (second, machines from then on)

    @property
    def end_s(self) -> float:
        return self.events[-1].at_s if self.events else self.counts[-1][0]

    def in_order(self, draw: Random) -> list[TraceEvent]:
        """All events in order of time; at one instant losses come before joins.

        Where machines have no names, `draw` says which of them go.
        """
        events = self.events or tuple(_named(self.counts, draw))
        return sorted(events, key=lambda event: (event.at_s, event.joins))


def _named(counts: tuple[tuple[float, int], ...], draw: Random) -> Iterator[TraceEvent]:
    alive: list[str] = []
    named = 0
    for at_s, count in counts:
        while len(alive) > count:
            yield TraceEvent(at_s, False, alive.pop(draw.randrange(len(alive))))
        while len(alive) < count:
            alive.append(f"{named}")
            yield TraceEvent(at_s, True, alive[-1])
            named += 1


def read_spot_trace(path: Path, name: str) -> SpotTrace:
    """Read events (`t_s,event,node`) or counts (`t_s,count`). Raises `FileRefused` naming the file as `name`."""
    with read_rows(path, name) as rows:
        if "count" in rows.columns:
            rows.need("t_s", "count")
            counts = [(row.number("t_s"), row.whole("count", most=_MOST)) for row in rows]
            rising(rows, [at for at, _ in counts], "t_s")
            if sum(abs(after - before) for (_, before), (_, after) in pairwise(counts)) > _MOST_CHANGES:
                rows.refuse_all(f"more than {_MOST_CHANGES} machines come and go; cut a window out of it")
            if not any(count for _, count in counts):
                rows.refuse_all("no machine ever joins; there is nothing to simulate")
            return SpotTrace(counts=tuple(dict(counts).items()))  # of one instant the last row counts
        rows.need("t_s", "event", "node")
        events = [TraceEvent(row.number("t_s"), row.word("event", _JOINS), row.name("node")) for row in rows]
        rising(rows, [event.at_s for event in events], "t_s")
        _check_presence(rows, events)
    return SpotTrace(events=tuple(events))


def _check_presence(rows: CsvRows, events: list[TraceEvent]) -> None:
    """Refuse machines that join twice or leave without having joined, and too many of them."""
    if rows.problems:
        return
    alive: set[str] = set()
    numbered = zip(rows.lines, events, strict=True)
    for line, event in sorted(numbered, key=lambda pair: (pair[1].at_s, pair[1].joins)):
        if event.joins == (event.node in alive):
            told = "joins, but is there already" if event.joins else "leaves, but is not there"
            rows.refuse(line, "node", f"{event.node!r} {told}; correct the row or take it out")
        (alive.add if event.joins else alive.discard)(event.node)
        if len(alive) > _MOST:
            rows.refuse(line, "node", f"more than {_MOST} machines are there; take a share of them out of the file")
    if not any(event.joins for event in events):
        rows.refuse_all("no machine ever joins; there is nothing to simulate")
