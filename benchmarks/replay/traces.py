"""Spot traces and distributions of response lengths, as the files of the shared traces have them."""

import csv
from bisect import bisect_left
from collections.abc import Sequence
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


class FleetEvent(NamedTuple):
    """At `t_s` the machine `node` is there, or gone without a word."""

    t_s: float
    joins: bool
    node: str


def read_spot(path: Path, seed: int = 0) -> list[FleetEvent]:
    """The events of a trace, either of named nodes (`t_s,event,node`) or of how many there are (`t_s,count`).

    Where nodes have no names, those that go are drawn. At one instant losses come before joins.
    """
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        raise ValueError(f"{path} has no rows; a spot trace has columns t_s,event,node or t_s,count")
    if "node" in rows[0]:
        events = [FleetEvent(float(row["t_s"]), row["event"] == "add", row["node"]) for row in rows]
    elif "count" in rows[0]:
        events = _of_counts([(float(row["t_s"]), int(row["count"])) for row in rows], Random(seed))
    else:
        raise ValueError(f"{path} has columns {','.join(rows[0])}; a spot trace has t_s,event,node or t_s,count")
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
    and there (of RollPacker's figure 5 % above 4k tokens, up to the cap of 16k that is to be named for it).
    """
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if rows and "quantile" in rows[0]:
        pairs = sorted((float(row["quantile"]), float(row["output_tokens"])) for row in rows)
    elif rows and "cdf" in rows[0]:
        pairs = sorted((float(row["cdf"]), float(row["tokens"])) for row in rows)
    else:
        raise ValueError(f"{path}: columns must be quantile,output_tokens or tokens,cdf")
    last, longest = pairs[-1]
    if last < 1.0 and "cdf" in rows[0]:
        steps = 32
        growth = max(1.0, cap / longest) ** (1.0 / steps)
        pairs += [(last + (1.0 - last) * step / steps, longest * growth**step) for step in range(1, steps + 1)]
    distinct = dict(pairs)  # of equal quantiles the longest
    return Distribution(tuple(distinct), tuple(distinct.values()))
