"""Arrivals of served requests: out of a recorded trace, made to fit a small engine, or made up.

A trace is a CSV file with the columns `t_s,input_tokens,output_tokens`. What is replayed of it is a window, faster or
slower, with lengths scaled by stated factors; requests that came together stay together.
"""

import csv
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Annotated, Final

from msgspec import Meta, Struct

from ebbtide.errors import InvalidRequest

COLUMNS: Final = ("t_s", "input_tokens", "output_tokens")


class TrafficRequest(Struct, frozen=True):
    """One request: when it arrives (seconds from the start), tokens of its prompt, tokens that it wants."""

    at: float
    prompt: int
    output: int


class TraceLengths(Struct, frozen=True, kw_only=True):
    """Factors on a trace's lengths, and bounds of what comes out."""

    prompts: float = 0.25
    outputs: float = 0.5
    longest_prompt: int = 4096
    longest_output: int = 512

    def scaled(self, at: float, prompt: int, output: int) -> TrafficRequest:
        return TrafficRequest(
            at,
            min(self.longest_prompt, max(8, round(prompt * self.prompts))),
            min(self.longest_output, max(2, round(output * self.outputs))),
        )


class TrafficBursts(Struct, frozen=True, kw_only=True):
    """Made-up traffic: bursts of `size` requests in the mean (geometric), `apart_s` apart from one another in a burst,
    and `quiet_s` between bursts (both exponential). Lengths are log-normal about their medians."""

    size: Annotated[float, Meta(ge=1)] = 6.0
    apart_s: float = 0.2
    quiet_s: float = 3.5
    prompt: int = 400
    output: int = 16
    spread: float = 0.5


def read_trace(path: Path, window: tuple[float, float], lengths: TraceLengths) -> list[TrafficRequest]:
    """The requests of `window` (seconds of the trace), times counted from its start.

    Raises `InvalidRequest` for a file that is no trace, or an empty window.
    """
    try:
        with path.open(newline="") as file:
            rows = csv.DictReader(file)
            if not set(COLUMNS) <= set(rows.fieldnames or ()):
                raise InvalidRequest(f"needs the columns {','.join(COLUMNS)}", field=str(path))
            found = [
                lengths.scaled(float(row["t_s"]) - window[0], int(row["input_tokens"]), int(row["output_tokens"]))
                for row in rows
                if window[0] <= float(row["t_s"]) < window[1]
            ]
    except (OSError, ValueError, TypeError) as error:
        raise InvalidRequest(f"cannot be read as a trace: {error}", field=str(path)) from None
    if not found:
        raise InvalidRequest(f"has no request from {window[0]:g} to {window[1]:g} s", field=str(path))
    return sorted(found, key=lambda request: request.at)


def made_up(bursts: TrafficBursts, seconds: float, seed: int) -> list[TrafficRequest]:
    """Arrivals for so many seconds; the same for the same seed."""
    random = Random(f"{seed}/traffic")

    def gaps() -> Iterator[float]:
        while True:
            yield random.expovariate(1 / bursts.quiet_s)
            while random.random() < 1 - 1 / bursts.size:
                yield random.expovariate(1 / bursts.apart_s)

    def length(median: int, least: int) -> int:
        return max(least, round(median * random.lognormvariate(0.0, bursts.spread)))

    found: list[TrafficRequest] = []
    for at in accumulate(gaps()):
        if at >= seconds:
            return found
        found.append(TrafficRequest(at, length(bursts.prompt, 8), length(bursts.output, 2)))
    raise AssertionError("gaps do not end")


def faster(requests: Sequence[TrafficRequest], speed: float) -> list[TrafficRequest]:
    """The same requests, `speed` times as fast one behind the other."""
    return [TrafficRequest(one.at / speed, one.prompt, one.output) for one in requests]


def laps(requests: Sequence[TrafficRequest], seconds: float, count: int) -> list[TrafficRequest]:
    """`requests`, which fill so many seconds, over and over."""
    return [TrafficRequest(one.at + lap * seconds, one.prompt, one.output) for lap in range(count) for one in requests]


def parse_window(text: str, *, field: str) -> tuple[float, float]:
    """`START:END`, seconds. Raises `InvalidRequest`."""
    start, _, end = text.partition(":")
    try:
        window = (float(start or 0), float(end))
    except ValueError:
        window = (0.0, 0.0)
    if not 0 <= window[0] < window[1] < float("inf"):
        raise InvalidRequest(f"{text!r} is no window: write START:END in seconds, such as 0:60", field=field)
    return window
