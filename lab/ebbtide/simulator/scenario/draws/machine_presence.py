"""Derives which machines of a pool are there from when to when, before failures at random."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from math import inf
from random import Random

from msgspec import Struct

from ebbtide.simulator.scenario.inputs.spot_trace import SpotTrace, TraceEvent
from ebbtide.simulator.scenario.machine_pool import MachinePool, SpotTraceSpec


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
