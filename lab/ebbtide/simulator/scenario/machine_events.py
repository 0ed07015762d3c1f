"""Derives a pool's machines from the seed: when each is there, and what befalls it."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from heapq import merge
from itertools import count, groupby
from math import inf, isfinite
from random import Random

from msgspec import Struct

from ebbtide.simulator.scenario.input_tables import SpotTrace, TraceEvent
from ebbtide.simulator.scenario.machine_pool import MachinePool, SpotTraceSpec
from ebbtide.simulator.scenario.scenario import Scenario


class Presence(Struct, frozen=True, order=True, gc=False):
    """A place in the fleet has a machine for a while. An end of inf is beyond the scenario."""

    begin_s: float
    node: str
    end_s: float


def presences(pool: MachinePool, traces: Mapping[str, SpotTrace], until_s: float, seed: int) -> list[Presence]:
    """List the pool's machines by begin. What reaches the scenario's end goes on to inf."""
    last_s = until_s if pool.until_s is None else min(until_s, pool.until_s)
    if pool.trace is None:
        found: Iterable[Presence] = (Presence(0.0, str(index), inf) for index in range(pool.workers or 0))
    else:
        found = _of_trace(pool.trace, traces[pool.trace.file], last_s - pool.from_s, seed)
    kept = []
    for presence in found:
        begin_s, end_s = presence.begin_s + pool.from_s, presence.end_s + pool.from_s
        if begin_s < last_s:
            kept.append(Presence(begin_s, presence.node, _end(end_s, last_s, until_s)))
    return sorted(kept)


def _end(end_s: float, last_s: float, until_s: float) -> float:
    end_s = min(end_s, last_s)
    return inf if end_s >= until_s else end_s


def _of_trace(spec: SpotTraceSpec, trace: SpotTrace, until_s: float, seed: int) -> Iterator[Presence]:
    own_seed = seed if spec.seed is None else spec.seed
    events = [
        event
        for event in trace.in_order(Random(f"{own_seed} trace {spec.file}"))
        if spec.share >= 1.0 or Random(f"{own_seed} share {event.node}").random() < spec.share
    ]
    span_s = spec.span_s or max(0.0, trace.end_s - spec.start_s)
    spans = _spans(_capped(_window(events, spec.start_s, span_s), spec.most))
    if not spec.repeats or span_s <= 0:
        return (Presence(one.begin_s * spec.time_scale, one.node, one.end_s * spec.time_scale) for one in spans)
    return _laps(sorted(spans), span_s, spec.time_scale, until_s)


def _window(events: Iterable[TraceEvent], start_s: float, span_s: float) -> list[TraceEvent]:
    """Cut a part of the trace, from time 0 on. What is there at its begin joins then."""
    alive: dict[str, None] = {}
    inside: list[TraceEvent] = []
    for event in events:
        if event.at_s > start_s + span_s:
            break
        if event.at_s > start_s:
            inside.append(TraceEvent(event.at_s - start_s, event.joins, event.node))
        elif event.joins:
            alive[event.node] = None
        else:
            alive.pop(event.node, None)
    return [*(TraceEvent(0.0, True, node) for node in alive), *inside]


def _capped(events: Iterable[TraceEvent], most: int | None) -> Iterator[TraceEvent]:
    """Let at most so many in. Others wait; at the instant in which a place becomes free the first of them takes it."""
    if most is None:
        yield from events
        return
    inside: set[str] = set()
    waiting: deque[str] = deque()
    for at_s, simultaneous in groupby(events, key=lambda event: event.at_s):
        for event in simultaneous:
            if event.joins:
                waiting.append(event.node)
            elif event.node in inside:
                inside.discard(event.node)
                yield event
            else:
                waiting.remove(event.node)
        while waiting and len(inside) < most:
            inside.add(node := waiting.popleft())
            yield TraceEvent(at_s, True, node)


def _spans(events: Iterable[TraceEvent]) -> list[Presence]:
    began: dict[str, float] = {}
    spans: list[Presence] = []
    for event in events:
        if event.joins:
            began[event.node] = event.at_s
        else:
            spans.append(Presence(began.pop(event.node), event.node, event.at_s))
    spans += [Presence(begin_s, node, inf) for node, begin_s in began.items()]
    return [span for span in spans if span.end_s > span.begin_s]


def _laps(spans: list[Presence], span_s: float, scale: float, until_s: float) -> Iterator[Presence]:
    """Repeat the window until the end. A machine that is there at its end and at its begin stays."""
    open_: dict[str, float] = {}
    lap = 0
    while lap * span_s * scale < until_s:
        base_s = lap * span_s
        at_begin = {span.node for span in spans if span.begin_s == 0.0}
        for node in [node for node in open_ if node not in at_begin]:
            yield Presence(open_.pop(node) * scale, node, base_s * scale)
        for span in spans:
            begin_s = open_.pop(span.node, span.begin_s + base_s) if span.begin_s == 0.0 else span.begin_s + base_s
            if span.end_s >= span_s:
                open_[span.node] = begin_s
            else:
                yield Presence(begin_s * scale, span.node, (span.end_s + base_s) * scale)
        lap += 1
    for node, begin_s in open_.items():
        yield Presence(begin_s * scale, node, inf)


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
