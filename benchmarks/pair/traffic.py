"""Arrivals out of a recorded trace, made to fit a small engine: a window of it, faster or slower, and shorter."""

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct

from ebbtide.errors import InvalidRequest

_COLUMNS: Final = ("t_s", "input_tokens", "output_tokens")
#: The speed at which a load is met is looked for between these, by halving.
_SLOWEST, _FASTEST, _HALVINGS = 1e-3, 1e3, 40


class Request(Struct, frozen=True):
    """One request: when it arrives (seconds from the start), tokens of its prompt, tokens that it wants."""

    at: float
    prompt: int
    output: int


class Lengths(Struct, frozen=True, kw_only=True):
    """Factors on a trace's lengths, and bounds of what comes out."""

    prompts: float = 0.25
    outputs: float = 0.5
    longest_prompt: int = 4096
    longest_output: int = 512

    def scaled(self, at: float, prompt: int, output: int) -> Request:
        return Request(
            at,
            min(self.longest_prompt, max(8, round(prompt * self.prompts))),
            min(self.longest_output, max(2, round(output * self.outputs))),
        )


class Speeds(Struct, frozen=True, kw_only=True):
    """Of a serving engine alone: a prompt takes `fixed_s` and `prompt_s` a token, a further token `token_s`."""

    fixed_s: float
    prompt_s: float
    token_s: float

    def prefill(self, tokens: int) -> float:
        return self.fixed_s + self.prompt_s * tokens


def read_trace(path: Path, window: tuple[float, float], lengths: Lengths) -> list[Request]:
    """The requests of `window` (seconds of the trace), times counted from its start.

    Raises `InvalidRequest` for a file without the columns `t_s,input_tokens,output_tokens`, or an empty window.
    """
    try:
        with path.open(newline="") as file:
            rows = csv.DictReader(file)
            if not set(_COLUMNS) <= set(rows.fieldnames or ()):
                raise InvalidRequest(f"needs the columns {','.join(_COLUMNS)}", field=str(path))
            found = [
                lengths.scaled(float(row["t_s"]) - window[0], int(row["input_tokens"]), int(row["output_tokens"]))
                for row in rows
                if window[0] <= float(row["t_s"]) < window[1]
            ]
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"cannot be read as a trace: {error}", field=str(path)) from None
    if not found:
        raise InvalidRequest(f"has no request from {window[0]:g} to {window[1]:g} s", field=str(path))
    return found


def faster(requests: Sequence[Request], speed: float) -> list[Request]:
    """The same requests, `speed` times as fast one behind the other."""
    return [Request(one.at / speed, one.prompt, one.output) for one in requests]


def busy_s(requests: Sequence[Request], speeds: Speeds) -> float:
    """Seconds with a request inside: prompts are read one after the other, tokens are made for all at once."""
    free = until = total = 0.0
    for one in requests:
        free = max(free, one.at) + speeds.prefill(one.prompt)
        end = free + one.output * speeds.token_s
        total += max(0.0, end - max(until, one.at))
        until = max(until, end)
    return total


def speed_for(requests: Sequence[Request], load: float, speeds: Speeds) -> float:
    """How many times as fast `requests` must come for the engine to be busy for `load` of the time."""
    slow, fast = _SLOWEST, _FASTEST
    for _ in range(_HALVINGS):
        middle = math.sqrt(slow * fast)
        at = faster(requests, middle)
        busy = busy_s(at, speeds)
        span = max(at[-1].at, busy)
        slow, fast = (middle, fast) if busy / span < load else (slow, middle)
    return math.sqrt(slow * fast)


def lasting(requests: Sequence[Request], load: float, speeds: Speeds, seconds: float) -> list[Request]:
    """The first of `requests`, as many as at that load last for `seconds`, at the speed at which they do."""
    few, many = 2, len(requests)
    while few < many:
        middle = (few + many + 1) // 2
        chosen = requests[:middle]
        if chosen[-1].at / speed_for(chosen, load, speeds) <= seconds:
            few = middle
        else:
            many = middle - 1
    chosen = requests[:few]
    return faster(chosen, speed_for(chosen, load, speeds))
