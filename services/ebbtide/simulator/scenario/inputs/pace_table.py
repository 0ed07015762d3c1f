"""Reads how the pace of served requests changes over a day."""

from pathlib import Path
from typing import Final

from msgspec import Struct

from ebbtide.simulator.scenario.inputs.csv_rows import read_rows, rising

DAY_S: Final = 86_400.0
#: A thousand times the recorded pace is no day's rhythm.
_FASTEST: Final = 1000.0


class PaceTable(Struct, frozen=True):
    """Factors on the speed of arrivals, each from its second of the day on. The first one is at 0."""

    times_s: tuple[float, ...]
    factors: tuple[float, ...]


def read_paces(path: Path, name: str) -> PaceTable:
    """Read `t_s,pace`. Raises `FileRefused` naming the file as `name`."""
    with read_rows(path, name) as rows:
        rows.need("t_s", "pace")
        found = [(row.number("t_s", most=DAY_S), row.number("pace", most=_FASTEST)) for row in rows]
        rising(rows, [at for at, _ in found], "t_s", strictly=True)
        if found[0][0] > 0 and not rows.problems:
            rows.refuse(rows.lines[0], "t_s", "must be 0 in the first row: a day has a pace from its begin on")
    return PaceTable(tuple(at for at, _ in found), tuple(pace for _, pace in found))
