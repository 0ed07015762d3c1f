"""Draws the requests that a borrowed machine serves, from a trace or in bursts."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import count
from random import Random
from typing import Final

from msgspec import Struct

from ebbtide.simulator.scenario.inputs.served_trace import ServedTrace
from ebbtide.simulator.scenario.machine_pool import ServingSpec

#: Nobody asks with less: a template alone has as many tokens.
_SHORTEST_PROMPT: Final = 8


class ServedArrival(Struct, frozen=True, gc=False):
    """A user's request. Lengths in tokens."""

    at_s: float  # of the scenario
    prompt: int
    output: int


def served_arrivals(
    serving: ServingSpec, traces: Mapping[str, ServedTrace], machine: str, seed: int
) -> Iterator[ServedArrival]:
    """Yield a machine's requests in order of time, without end. Those that came together stay together."""
    draw = Random(f"{seed} served {'' if serving.alike else machine}")
    if serving.file is None:
        return _bursts(serving, draw)
    return _replayed(serving, traces[serving.file], draw)


def burst_pause_s(serving: ServingSpec) -> float:
    """The mean gap between two bursts under which requests come at the stated rate. At 0 or less there is none."""
    return serving.burst / serving.requests_per_s - (serving.burst - 1.0) * serving.burst_gap_s


def _bursts(serving: ServingSpec, draw: Random) -> Iterator[ServedArrival]:
    pause_s, at_s = burst_pause_s(serving), 0.0
    while True:
        at_s += draw.expovariate(1.0 / pause_s)
        while True:
            yield _request(serving, at_s / serving.load, *(_length(draw, serving, kind) for kind in (True, False)))
            if draw.random() >= 1.0 - 1.0 / serving.burst:
                break
            at_s += draw.expovariate(1.0 / serving.burst_gap_s)


def _length(draw: Random, serving: ServingSpec, prompt: bool) -> float:
    return (serving.prompt_tokens if prompt else serving.output_tokens) * draw.lognormvariate(0.0, serving.spread)


def _replayed(serving: ServingSpec, trace: ServedTrace, draw: Random) -> Iterator[ServedArrival]:
    """Repeat the window for ever, from a drawn place in it on."""
    span_s = served_span_s(serving, trace)
    first = bisect_left(trace.times_s, serving.start_s)
    last = bisect_left(trace.times_s, serving.start_s + span_s)
    from_s = 0.0 if serving.alike else draw.random() * span_s
    begin = bisect_left(trace.times_s, serving.start_s + from_s)
    for lap in count():
        for index in range(begin if lap == 0 else first, last):
            at_s = lap * span_s + trace.times_s[index] - serving.start_s - from_s
            yield _request(serving, at_s / serving.load, trace.prompts[index], trace.outputs[index])


def served_span_s(serving: ServingSpec, trace: ServedTrace) -> float:
    """Seconds of the trace until it begins again. A trace goes on for a mean gap beyond its last request."""
    if serving.span_s:
        return serving.span_s
    rest = len(trace.times_s) - bisect_left(trace.times_s, serving.start_s)
    return (trace.end_s - serving.start_s) * rest / max(1, rest - 1)


def _request(serving: ServingSpec, at_s: float, prompt: float, output: float) -> ServedArrival:
    return ServedArrival(
        at_s,
        min(serving.longest_prompt, max(_SHORTEST_PROMPT, round(prompt * serving.prompt_scale))),
        min(serving.longest_output, max(1, round(output * serving.output_scale))),
    )
