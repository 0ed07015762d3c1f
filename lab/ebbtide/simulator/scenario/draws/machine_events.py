"""Derives what happens to a pool's machines: arrivals, notices, losses and stalls, in order of time."""

from collections.abc import Iterator
from enum import IntEnum
from heapq import merge
from itertools import count
from math import inf, isfinite
from random import Random

from msgspec import Struct

from ebbtide.simulator.scenario.draws.machine_presence import Presence, presences
from ebbtide.simulator.scenario.machine_pool import MachinePool
from ebbtide.simulator.scenario.scenario import Scenario

_HOUR_S = 3600.0


class MachineChange(IntEnum):
    """What happens. At one instant it happens in this order, so losses come before arrivals."""

    GONE = 1  # without a further word
    COMES = 2  # it begins to boot
    NOTICE = 3  # it will be gone
    STALLS = 4  # it makes nothing for a while, and then goes on


class MachineEvent(Struct, frozen=True, order=True, gc=False):
    at_s: float  # of the scenario
    change: MachineChange
    machine: str  # unique in the scenario; a machine that is gone does not come again
    for_s: float = 0.0  # NOTICE: until it is gone; STALLS: how long


def machine_events(scenario: Scenario, pool: MachinePool, seed: int) -> Iterator[MachineEvent]:
    """Yield all events of a pool in order, up to the scenario's end, the same ones for the same seed."""
    until_s = scenario.until_s
    places: dict[str, list[Presence]] = {}
    for presence in presences(pool, scenario.tables.spots, until_s, seed):
        places.setdefault(presence.node, []).append(presence)
    return merge(*(_place(pool, node, there, until_s, seed) for node, there in places.items()))


def _place(
    pool: MachinePool, node: str, presences: list[Presence], until_s: float, seed: int
) -> Iterator[MachineEvent]:
    """The events of the machines that follow each other in one place."""
    lives = count(1)
    for presence in presences:
        for begin_s, end_s in _losses(pool, presence, until_s, seed):
            life = next(lives)
            machine = machine_name(pool.name, str(life), node)
            yield from _life(pool, machine, begin_s, end_s, until_s, seed)


def machine_name(pool: str, life: str, node: str) -> str:
    """Name a machine. Pools' names have no dot: what stands before the first one tells pool and life, whatever the
    node.
    """
    return f"{pool}-{life}.{node}"


def pool_of(machine: str) -> str:
    """Return the pool of a machine with such a name."""
    return machine.partition(".")[0].rpartition("-")[0]


def machine_speed(pool: MachinePool, machine: str, seed: int) -> float:
    """Draw a machine's speed as a factor on the engine's, uniform within the pool's spread."""
    if not pool.speed_spread:
        return 1.0
    return 1.0 + pool.speed_spread * (2.0 * Random(f"{seed} speed {machine}").random() - 1.0)


def _losses(pool: MachinePool, presence: Presence, until_s: float, seed: int) -> Iterator[tuple[float, float]]:
    """Cut a presence where machines are lost at random: begin and end of each machine in its place."""
    begin_s = presence.begin_s
    if pool.losses_per_hour:
        draw = Random(f"{seed} losses {pool.name} {presence.node} {presence.begin_s!r}")
        while (lost_s := begin_s + draw.expovariate(pool.losses_per_hour) * _HOUR_S) < min(presence.end_s, until_s):
            yield begin_s, lost_s
            begin_s = lost_s + pool.replaced_s if pool.replaced_s is not None else inf
            if begin_s >= min(presence.end_s, until_s):
                return
    yield begin_s, presence.end_s


def _life(
    pool: MachinePool, machine: str, begin_s: float, end_s: float, until_s: float, seed: int
) -> Iterator[MachineEvent]:
    yield MachineEvent(begin_s, MachineChange.COMES, machine)
    ending = []
    if isfinite(end_s):
        if pool.notice_s and Random(f"{seed} notice {machine}").random() >= pool.unannounced:
            told_s = max(begin_s, end_s - pool.notice_s)
            ending.append(MachineEvent(told_s, MachineChange.NOTICE, machine, end_s - told_s))
        ending.append(MachineEvent(end_s, MachineChange.GONE, machine))
    yield from merge(ending, _stalls(pool, machine, begin_s, min(end_s, until_s), seed))


def _stalls(pool: MachinePool, machine: str, begin_s: float, end_s: float, seed: int) -> Iterator[MachineEvent]:
    if not pool.stalls_per_hour:
        return
    draw = Random(f"{seed} stalls {machine}")
    at_s = begin_s + draw.expovariate(pool.stalls_per_hour) * _HOUR_S
    while at_s < end_s:
        yield MachineEvent(at_s, MachineChange.STALLS, machine, pool.stall_s)
        at_s += pool.stall_s + draw.expovariate(pool.stalls_per_hour) * _HOUR_S
