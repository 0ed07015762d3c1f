"""Computes each run's present share of the fleet from weights, floors, ceilings, priorities, and what each can use.

Weighted max-min fairness by filling (Bertsekas and Gallager, Data Networks, 1992, section 6.5.2), with lower and upper
bounds, one priority class after the other. The floors of lower classes are reserved for them. Capacity that no run can
use is divided once more among all, limited only by ceilings: that costs no run anything.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from math import inf
from typing import Final, NamedTuple

from msgspec import Struct

from ebbtide.errors import NotReady

#: Shares that differ by less are equal: they are floats.
EPSILON: Final = 1e-9


class Demand(Struct, frozen=True, kw_only=True):
    """A run with work. `weight`, `floor`, `ceiling`, `priority`: see `ShareSpec`."""

    run_id: str
    weight: float = 1.0
    floor: float = 0.0
    ceiling: float | None = None
    priority: int = 0
    wants: float = inf  # workers that its rollouts would fill
    owed_s: float = 0.0  # worker-seconds; below 0: that it owes
    work_s: float = inf  # worker-seconds that its rollouts would take
    starved_s: float = 0.0  # for how long it has had work and no worker
    architecture: str = ""  # of its weights, once known


class _Part(NamedTuple):
    run_id: str
    weight: float
    low: float
    high: float


def entitled(demands: Iterable[Demand], workers: int) -> dict[str, float]:
    """Each run's share of a fleet of so many workers. The sum is 1, or less if ceilings limit all runs."""
    if not workers:
        return {}
    runs = sorted(demands, key=lambda one: -one.priority)
    usable = {one.run_id: min(_ceiling(one), one.wants / workers) for one in runs}
    floors = {one.run_id: min(one.floor, usable[one.run_id]) for one in runs}
    shares = _by_class(runs, floors, usable)
    if sum(shares.values()) < 1.0 - EPSILON:
        shares = _by_class(runs, shares, {one.run_id: _ceiling(one) for one in runs})
    return shares


def check_floor(run_id: str, floor: float, floors: Mapping[str, float]) -> None:
    """Raises `NotReady` if the fleet cannot promise `floor` to a run beside the `floors` of the other live runs."""
    others = {name: value for name, value in floors.items() if value > 0.0 and name != run_id}
    left = 1.0 - sum(others.values())
    if floor <= left + EPSILON:
        return
    held = ", ".join(f"{name} ({value:g})" for name, value in sorted(others.items(), key=lambda item: -item[1])[:5])
    raise NotReady(
        f"share.floor: {floor:g} of the fleet cannot be promised: live runs have floors of {1.0 - left:g} in all: "
        f"{held}; ask for at most {max(0.0, left):.3g}, or wait until one of them has ended"
    )


def _by_class(runs: Sequence[Demand], low: Mapping[str, float], high: Mapping[str, float]) -> dict[str, float]:
    """`runs`: highest priority first. Each class gets what higher classes, and the `low` of lower ones, leave."""
    shares: dict[str, float] = {}
    left, reserved = 1.0, sum(low.values())
    for _, members in groupby(runs, key=lambda one: one.priority):
        parts = [_Part(one.run_id, one.weight, low[one.run_id], high[one.run_id]) for one in members]
        reserved -= sum(part.low for part in parts)
        given = _filled(left - reserved, parts)
        left -= sum(given.values())
        shares |= given
    return shares


def _filled(room: float, parts: Sequence[_Part]) -> dict[str, float]:
    """Divide `room` among `parts` in proportion to their weights within their bounds; exact, bound by bound."""
    lows = sum(part.low for part in parts)
    if lows >= room - EPSILON:  # nothing is left to share
        return {part.run_id: part.low for part in parts}
    if sum(part.high for part in parts) <= room:
        return {part.run_id: part.high for part in parts}
    events = sorted(
        event
        for part in parts
        for event in ((part.low / part.weight, part.weight), (part.high / part.weight, -part.weight))
    )
    level, total, slope = 0.0, lows, 0.0
    for at, change in events:
        if slope > EPSILON and total + slope * (at - level) >= room:
            break
        total, level, slope = total + slope * (at - level), at, slope + change
    level += (room - total) / slope if slope > EPSILON else 0.0
    return {part.run_id: min(part.high, max(part.low, level * part.weight)) for part in parts}


def _ceiling(one: Demand) -> float:
    return 1.0 if one.ceiling is None else one.ceiling
