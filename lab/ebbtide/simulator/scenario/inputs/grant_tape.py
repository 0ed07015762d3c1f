"""Reads when a host lent its device to a borrowed worker, and at which share of the worker's speed."""

from bisect import bisect_right
from collections.abc import Iterator
from itertools import groupby, pairwise
from pathlib import Path
from typing import Final

from msgspec import Struct

from ebbtide.simulator.scenario.inputs.csv_rows import read_rows, rising

#: A worker that is slower yet is as good as not lent.
_SLOWEST: Final = 0.01


class GrantTape(Struct, frozen=True):
    """Shares of the worker's own speed, each from its second on; 0: it stands still. It begins again at `end_s`."""

    times_s: tuple[float, ...]  # rising from 0
    shares: tuple[float, ...]
    end_s: float

    def spells(self, from_s: float) -> Iterator[tuple[float, float]]:
        """Yield the seconds and the share of each spell from `from_s` of the tape on, for ever."""
        at = bisect_right(self.times_s, from_s) - 1
        ends = (*self.times_s[1:], self.end_s)
        yield ends[at] - from_s, self.shares[at]
        while True:
            at = (at + 1) % len(ends)
            yield ends[at] - self.times_s[at], self.shares[at]

    @property
    def granted_share(self) -> float:
        """Share of the time in which the worker may step."""
        return sum(self._lengths(granted=True)) / self.end_s

    def usual_s(self, *, granted: bool) -> float:
        """Mean seconds for which the worker may step without a break, or stands still; 0.0 if it never does."""
        found = self._lengths(granted=granted)
        return sum(found) / len(found) if found else 0.0

    def _lengths(self, *, granted: bool) -> list[float]:
        spans = zip(pairwise((*self.times_s, self.end_s)), self.shares, strict=True)
        states = groupby(((share > 0.0, end - begin) for (begin, end), share in spans), key=lambda span: span[0])
        return [sum(seconds for _, seconds in spell) for state, spell in states if state is granted]


def read_grants(path: Path, name: str) -> GrantTape:
    """Read `t_s,share`, whose last row ends the tape. Raises `FileRefused` naming the file as `name`."""
    with read_rows(path, name) as rows:
        rows.need("t_s", "share")
        found = [(row.number("t_s"), row.number("share", most=1.0)) for row in rows]
        rising(rows, [at for at, _ in found], "t_s", strictly=True)
        if not rows.problems:
            if found[0][0] > 0:
                rows.refuse(rows.lines[0], "t_s", "must be 0 in the first row")
            if len(found) < 2:
                rows.refuse_all("has one row; the last one only ends the tape, so add another")
            for line, (_, share) in zip(rows.lines[:-1], found, strict=False):
                if 0.0 < share < _SLOWEST:
                    rows.refuse(line, "share", f"is {share:.12g}; it must be 0, or from {_SLOWEST} to 1")
            if not any(share for _, share in found[:-1]):
                rows.refuse_all("no share is above 0; leave out machines that are never lent")
    times, shares = zip(*found[:-1], strict=True)
    return GrantTape(times, shares, found[-1][0])
