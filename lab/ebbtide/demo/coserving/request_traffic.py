"""Makes arrivals of served requests from a recorded trace, scaled for a small engine, or at random.

A trace is a CSV file with the columns `t_s,input_tokens,output_tokens`. A window of it is replayed, at a scaled pace
and with scaled lengths; requests that came together stay together.
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
    at: float  # arrival, in seconds from the start
    prompt: int  # tokens
    output: int  # tokens


class TraceLengths(Struct, frozen=True, kw_only=True):
    """Factors on a trace's lengths, and bounds of the scaled ones."""

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
    """Made-up traffic in bursts."""

    size: Annotated[float, Meta(ge=1)] = 6.0  # mean requests of a burst (geometric)
    apart_s: float = 0.2  # mean gap within a burst (exponential)
    quiet_s: float = 3.5  # mean gap between bursts (exponential)
    prompt: int = 400  # median length (log-normal)
    output: int = 16  # median length (log-normal)
    spread: float = 0.5  # of the lengths


def read_trace(path: Path, window: tuple[float, float], lengths: TraceLengths) -> list[TrafficRequest]:
    """Reads the requests of `window` (seconds of the trace). Raises `InvalidRequest` for no trace, or no request."""
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
    """Makes arrivals for so many seconds, the same for the same seed."""
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
    """Returns the same requests, `speed` times as fast."""
    return [TrafficRequest(one.at / speed, one.prompt, one.output) for one in requests]


def laps(requests: Sequence[TrafficRequest], seconds: float, count: int) -> list[TrafficRequest]:
    """Repeats `requests`, which fill so many seconds, `count` times."""
    return [TrafficRequest(one.at + lap * seconds, one.prompt, one.output) for lap in range(count) for one in requests]


def parse_window(text: str, *, field: str) -> tuple[float, float]:
    """Reads `START:END` in seconds. Raises `InvalidRequest`."""
    start, _, end = text.partition(":")
    try:
        window = (float(start or 0), float(end))
    except ValueError:
        window = (0.0, 0.0)
    if not 0 <= window[0] < window[1] < float("inf"):
        raise InvalidRequest(f"{text!r} is no window: write START:END in seconds, such as 0:60", field=field)
    return window
