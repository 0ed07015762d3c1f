"""Holds prices over time, and adds them up."""

from bisect import bisect_right
from itertools import pairwise
from pathlib import Path
from typing import Final

from msgspec import Struct

from ebbtide.simulator.scenario.inputs.csv_rows import read_rows, rising

#: Dollars per machine and hour. No machine costs more.
_DEAREST: Final = 1e6
_HOUR_S: Final = 3600.0


class PriceTable(Struct, frozen=True):
    """Dollars per hour from each moment on, in seconds of the scenario. The first price holds before it, too."""

    times_s: tuple[float, ...]
    dollars_per_hour: tuple[float, ...]

    def cost(self, begin_s: float, end_s: float) -> float:
        """Dollars for one machine between two moments."""
        if end_s <= begin_s:
            return 0.0
        first, last = (max(0, bisect_right(self.times_s, at) - 1) for at in (begin_s, end_s))
        cuts = [begin_s, *self.times_s[first + 1 : last + 1], end_s]
        prices = self.dollars_per_hour[first : last + 1]
        spans = zip(pairwise(cuts), prices, strict=True)
        return sum((end - begin) * price for (begin, end), price in spans) / _HOUR_S


def fixed_price(dollars_per_hour: float) -> PriceTable:
    return PriceTable((0.0,), (dollars_per_hour,))


def read_prices(path: Path, name: str) -> PriceTable:
    """Read `t_s,dollars_per_hour`. Raises `FileRefused` naming the file as `name`."""
    with read_rows(path, name) as rows:
        rows.need("t_s", "dollars_per_hour")
        found = [(row.number("t_s"), row.number("dollars_per_hour", most=_DEAREST)) for row in rows]
        rising(rows, [at for at, _ in found], "t_s", strictly=True)
    return PriceTable(tuple(at for at, _ in found), tuple(price for _, price in found))
