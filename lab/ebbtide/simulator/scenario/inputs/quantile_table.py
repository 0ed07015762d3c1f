"""Holds a distribution as quantiles, with straight lines between them."""

from bisect import bisect_left
from pathlib import Path
from typing import Final

from msgspec import Struct

from ebbtide.simulator.scenario.inputs.csv_rows import read_rows, rising

_LARGEST: Final = 1e9
#: Names of a value's column.
_VALUES: Final = ("output_tokens", "tokens", "seconds", "turns", "value")


class QuantileTable(Struct, frozen=True):
    """Values at rising shares."""

    shares: tuple[float, ...]
    values: tuple[float, ...]
    continued: bool = False  # beyond the last share its line goes on; otherwise values rise log-uniformly to the cap

    def at(self, share: float, most: float | None = None) -> float:
        """The value at a share from 0 to 1. `most` ends a tail that the table leaves out."""
        last, longest = self.shares[-1], self.values[-1]
        if share > last and not self.continued:
            if most is None or most <= longest or longest <= 0:
                return longest
            growth: float = (most / longest) ** ((share - last) / (1.0 - last))
            return longest * growth
        if share < self.shares[0]:
            begin = max(0.0, self._line(1, 0.0))
            return begin + (self.values[0] - begin) * share / self.shares[0]
        return self._line(min(max(1, bisect_left(self.shares, share)), len(self.shares) - 1), share)

    def _line(self, index: int, share: float) -> float:
        """The line between two rows, also beyond them."""
        low, high = self.shares[index - 1], self.shares[index]
        start, end = self.values[index - 1], self.values[index]
        return start + (end - start) * (share - low) / (high - low)


def read_quantiles(path: Path, name: str) -> QuantileTable:
    """Read `quantile,VALUE` or `VALUE,cdf`. Raises `FileRefused` naming the file as `name`.

    A column VALUE is called output_tokens, tokens, seconds, turns or value. Of equal shares the largest value counts.
    The first line goes on to share 0, and the last one of quantiles to 1. A cdf that ends below 1 says nothing of the
    rest, which lies between its last value and the cap, log-uniformly (of RollPacker's figure 5 % lie above 4k tokens,
    up to 16k).
    """
    with read_rows(path, name) as rows:
        value = rows.one_of(_VALUES, "the values' column")
        share = rows.one_of(("quantile", "cdf"), "the shares' column")
        found = [(row.number(share, most=1.0), row.number(value, most=_LARGEST)) for row in rows]
        rising(rows, [at for at, _ in found], share)
        rising(rows, [amount for _, amount in found], value)
        distinct = dict(found)
        if len(distinct) < 2 and not rows.problems:
            rows.refuse_all("has one share alone; it needs values at two different ones, to draw a line between them")
    return QuantileTable(tuple(distinct), tuple(distinct.values()), share == "quantile")
