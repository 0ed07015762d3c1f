"""Derives the requests that users send to a borrowed machine: a window of a trace, or made up in bursts."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from random import Random
from typing import Final

from msgspec import Struct

from ebbtide.simulator.scenario.inputs.served_trace import ServedTrace
from ebbtide.simulator.scenario.machine_pool import ServingSpec

#: Nobody asks with less: a template alone has as many tokens.
_SHORTEST_PROMPT: Final = 8
#: What is made up repeats after an hour, or after so many requests.
_MADE_UP_S: Final = 3600.0
_MADE_UP: Final = 50_000


class ServedArrival(Struct, frozen=True, gc=False):
    """A user's request. Lengths in tokens."""

    at_s: float  # of the recording
    prompt: int
    output: int


class ServedRecording(Struct, frozen=True):
    """The requests of a pool's users. After its last second it begins again."""

    requests: tuple[ServedArrival, ...]  # in order of time; those that came together stay together
    seconds: float


def served_recording(serving: ServingSpec, traces: Mapping[str, ServedTrace], pool: str, seed: int) -> ServedRecording:
    """What the users of a pool's machines ask for. `pool`: its name, on which draws depend."""
    if serving.file is not None:
        found, span_s = _window(serving, traces[serving.file])
    else:
        span_s = min(_MADE_UP_S, _MADE_UP / serving.requests_per_s)
        found = _bursts(serving, span_s, Random(f"{seed} served {pool}"))
    requests = tuple(_request(serving, at_s, prompt, output) for at_s, prompt, output in found)
    return ServedRecording(requests, span_s / serving.load)


def burst_pause_s(serving: ServingSpec) -> float:
    """The mean gap between two bursts under which requests come at the stated rate. At 0 or less there is none."""
    return serving.burst / serving.requests_per_s - (serving.burst - 1.0) * serving.burst_gap_s


def served_span_s(serving: ServingSpec, trace: ServedTrace) -> float:
    """Seconds of the trace until it begins again. Without a stated span it goes on for a mean gap after its end."""
    if serving.span_s:
        return serving.span_s
    rest = len(trace.times_s) - bisect_left(trace.times_s, serving.start_s)
    length_s = trace.end_s - serving.start_s
    return length_s * rest / (rest - 1) if rest > 1 and length_s > 0 else length_s + 1.0


def _window(serving: ServingSpec, trace: ServedTrace) -> tuple[Iterator[tuple[float, float, float]], float]:
    span_s = served_span_s(serving, trace)
    first, last = (bisect_left(trace.times_s, serving.start_s + later_s) for later_s in (0.0, span_s))
    rows = zip(trace.times_s[first:last], trace.prompts[first:last], trace.outputs[first:last], strict=True)
    return ((at_s - serving.start_s, prompt, output) for at_s, prompt, output in rows), span_s


def _bursts(serving: ServingSpec, span_s: float, draw: Random) -> Iterator[tuple[float, float, float]]:
    pause_s, at_s = burst_pause_s(serving), 0.0
    while True:
        at_s += draw.expovariate(1.0 / pause_s)
        while at_s < span_s:
            prompt, output = (
                median * draw.lognormvariate(0.0, serving.spread)
                for median in (serving.prompt_tokens, serving.output_tokens)
            )
            yield at_s, prompt, output
            if draw.random() >= 1.0 - 1.0 / serving.burst:
                break
            at_s += draw.expovariate(1.0 / serving.burst_gap_s)
        if at_s >= span_s:
            return


def _request(serving: ServingSpec, at_s: float, prompt: float, output: float) -> ServedArrival:
    return ServedArrival(
        at_s / serving.load,
        min(serving.longest_prompt, max(_SHORTEST_PROMPT, round(prompt * serving.prompt_scale))),
        min(serving.longest_output, max(1, round(output * serving.output_scale))),
    )
