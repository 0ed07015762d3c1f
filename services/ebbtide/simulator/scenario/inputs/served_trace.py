"""Reads traces of served requests."""

from pathlib import Path
from typing import Final

from msgspec import Struct

from ebbtide.simulator.scenario.inputs.csv_rows import read_rows, rising

_LONGEST: Final = 16 << 20


class ServedTrace(Struct, frozen=True):
    """Requests as recorded. Times in seconds, lengths in tokens."""

    times_s: tuple[float, ...]
    prompts: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def end_s(self) -> float:
        return self.times_s[-1]


def read_served_trace(path: Path, name: str) -> ServedTrace:
    """Read `t_s,input_tokens,output_tokens`. Raises `FileRefused` naming the file as `name`."""
    with read_rows(path, name) as rows:
        rows.need("t_s", "input_tokens", "output_tokens")
        found = [
            (
                row.number("t_s"),
                row.whole("input_tokens", most=_LONGEST),
                row.whole("output_tokens", most=_LONGEST),
            )
            for row in rows
        ]
        rising(rows, [at for at, _, _ in found], "t_s")
    times, prompts, outputs = zip(*found, strict=True)
    return ServedTrace(times, prompts, outputs)
