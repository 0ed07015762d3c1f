"""Spot traces and distributions of response lengths, as the files of the shared traces have them.

What cannot be read raises `ValueError`, naming the file, the row and what there should be.
"""

import csv
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import inf, isfinite
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

#: The longest response: what a distribution says above it is cut off.
CAP_TOKENS: Final = 32_768
#: For those who may name another.
CAP_HELP: Final = (
    "the longest response in tokens, also after stretching (default: 32768). A cdf that ends below 1 says nothing of "
    "the rest: it is taken to lie between its last point and the cap, log-uniformly. For responses that were cut off "
    "at 16k (as those of response_length_math_cdf_upto4k.csv were) name 16384"
)


#: What a machine's events are called, and whether it joins.
_JOINS: Final = {"add": True, "remove": False}
#: More machines or tokens than any trace or response has.
_MACHINES: Final = 1_000_000
_TOKENS: Final = 1e9


class FleetEvent(NamedTuple):
    """At `t_s` the machine `node` is there, or gone without a word."""

    t_s: float
    joins: bool
    node: str


def read_spot(path: Path, seed: int = 0) -> list[FleetEvent]:
    """The events of a trace, either of named nodes (`t_s,event,node`) or of how many there are (`t_s,count`).

    Where nodes have no names, those that go are drawn. At one instant losses come before joins. Raises `ValueError`.
    """
    rows = list(_rows(path))
    columns = rows[0].keys
    if "node" in columns:
        events = [FleetEvent(row.number("t_s", 0), row.word("event", _JOINS), row.text("node")) for row in rows]
    elif "count" in columns:
        points = [(row.number("t_s", 0), row.whole("count", _MACHINES)) for row in rows]
        events = _of_counts(points, Random(seed))
    else:
        raise ValueError(f"{path} has columns {','.join(columns)}; a spot trace has t_s,event,node or t_s,count")
    if not any(event.joins for event in events):
        raise ValueError(f"{path}: no machine ever joins; there is nothing to replay")
    return sorted(events, key=lambda event: (event.t_s, event.joins))


def _of_counts(points: Sequence[tuple[float, int]], draw: Random) -> list[FleetEvent]:
    events: list[FleetEvent] = []
    alive: list[str] = []
    named = 0
    for t_s, count in points:
        while len(alive) > count:
            events.append(FleetEvent(t_s, False, alive.pop(draw.randrange(len(alive)))))
        while len(alive) < count:
            named += 1
            alive.append(f"node{named}")
            events.append(FleetEvent(t_s, True, alive[-1]))
    return events


def window(events: Sequence[FleetEvent], start_s: float, length_s: float) -> list[FleetEvent]:
    """The part of a trace between two moments, from time 0 on; what was there at its start joins then."""
    alive: dict[str, FleetEvent] = {}
    inside: list[FleetEvent] = []
    for event in events:
        if event.t_s > start_s + length_s:
            break
        if event.t_s > start_s:
            inside.append(event._replace(t_s=event.t_s - start_s))
        elif event.joins:
            alive[event.node] = event._replace(t_s=0.0)
        else:
            alive.pop(event.node, None)
    return [*alive.values(), *inside]


def serving(events: Sequence[FleetEvent], delay_s: float) -> list[tuple[float, int]]:
    """How many machines serve from when on: each from `delay_s` after it joined until it is gone."""
    since: dict[str, float] = {}
    changes: list[tuple[float, int]] = []
    for event in events:
        if event.joins:
            since[event.node] = event.t_s + delay_s
        elif (began := since.pop(event.node, event.t_s)) < event.t_s:
            changes += [(began, 1), (event.t_s, -1)]
    changes += [(began, 1) for began in since.values()]
    points: dict[float, int] = {}
    number = 0
    for at, change in sorted(changes):
        number += change
        points[at] = number
    return list(points.items())


class Distribution(NamedTuple):
    """Response lengths: `tokens` at rising `quantiles`, straight lines between them."""

    quantiles: tuple[float, ...]
    tokens: tuple[float, ...]

    def draw(self, draw: Random, *, stretch: float = 1.0, cap: int = CAP_TOKENS) -> int:
        """One length, stretched and then capped; above the last quantile the last line goes on."""
        share = draw.random()
        at = min(max(1, bisect_left(self.quantiles, share)), len(self.quantiles) - 1)
        low, high = self.quantiles[at - 1], self.quantiles[at]
        start, end = self.tokens[at - 1], self.tokens[at]
        length = start + (end - start) * (share - low) / (high - low)
        return max(1, min(cap, round(length * stretch)))


def read_lengths(path: Path, cap: int = CAP_TOKENS) -> Distribution:
    """A distribution, given as `quantile,output_tokens` or as `tokens,cdf`.

    A cdf that ends below 1 goes on to the cap, log-uniformly: the share that is missing lies between its last point
    and there (of RollPacker's figure 5 % above 4k tokens, up to the cap of 16k that is to be named for it). Raises
    `ValueError`.
    """
    rows = list(_rows(path))
    columns = rows[0].keys
    if "quantile" in columns:
        pairs = sorted((row.number("quantile", 0, 1), row.number("output_tokens", 1, _TOKENS)) for row in rows)
    elif "cdf" in columns:
        pairs = sorted((row.number("cdf", 0, 1), row.number("tokens", 1, _TOKENS)) for row in rows)
    else:
        raise ValueError(f"{path} has columns {','.join(columns)}; lengths have quantile,output_tokens or tokens,cdf")
    if any(tokens < before for (_, before), (_, tokens) in pairwise(pairs)):
        raise ValueError(f"{path}: tokens must not fall as their share rises")
    last, longest = pairs[-1]
    if last < 1.0 and "cdf" in columns:
        steps = 32
        growth = max(1.0, cap / longest) ** (1.0 / steps)
        pairs += [(last + (1.0 - last) * step / steps, longest * growth**step) for step in range(1, steps + 1)]
    distinct = dict(pairs)  # of equal quantiles the longest
    if len(distinct) < 2:
        raise ValueError(f"{path}: needs lengths at two different shares at least, to draw a line between them")
    return Distribution(tuple(distinct), tuple(distinct.values()))


class _Row:
    """A row of a table, whose cells are asked for by what they should be."""

    def __init__(self, path: Path, line: int, cells: dict[str | None, str | None]) -> None:
        self._where, self._cells = f"{path}, line {line}", cells

    @property
    def keys(self) -> list[str]:
        return [name for name in self._cells if name is not None]

    def text(self, name: str) -> str:
        text = (self._cells.get(name) or "").strip()
        if not text:
            raise ValueError(f"{self._where}: {name} is missing")
        return text

    def word(self, name: str, known: dict[str, bool]) -> bool:
        if (text := self.text(name)) not in known:
            raise ValueError(f"{self._where}: {name} is {text!r}; it must be {' or '.join(known)}")
        return known[text]

    def number(self, name: str, least: float, most: float = inf) -> float:
        text = self.text(name)
        try:
            value = float(text)
        except ValueError:
            value = inf
        if not isfinite(value) or not least <= value <= most:
            upto = f" up to {most:g}" if isfinite(most) else ""
            raise ValueError(f"{self._where}: {name} is {text!r}; it must be a number from {least:g} on{upto}")
        return value

    def whole(self, name: str, most: int) -> int:
        value = self.number(name, 0, most)
        if value != int(value):
            raise ValueError(f"{self._where}: {name} is {value:g}; it must be a whole number")
        return int(value)


def _rows(path: Path) -> Iterator[_Row]:
    """Raises `ValueError` if there are none."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        try:
            found = [(reader.line_num, cells) for cells in reader]
        except csv.Error as error:
            raise ValueError(
                f"{path}, line {reader.line_num}: {error}; it must be a table of comma-separated values"
            ) from None
    if not found:
        raise ValueError(f"{path} has no rows; it must be a table with a head and a row at least")
    return (_Row(path, line, cells) for line, cells in found)
