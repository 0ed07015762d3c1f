"""Reads the tables of comma-separated values that a scenario names: spot traces, quantiles, prices and grants."""

import csv
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from io import StringIO
from itertools import groupby, islice, pairwise
from pathlib import Path
from random import Random
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NamedTuple,
    NoReturn,
    TypeAlias,
    TypeVar,
    get_args,
    get_type_hints,
)

import msgspec
from msgspec import Meta, Struct

from ebbtide.checked_files import MOST_PROBLEMS, FileRefused, Problem, read_text, shown, wanted

#: A million requests are about 20 MB.
_MOST_BYTES: Final = 32 << 20
_MOST_LINES: Final = 1_000_000
_Row = TypeVar("_Row", bound=Struct)
#: Three years at most.
_Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e8)]
_Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]


class CsvTable:
    """A table of comma-separated values without empty rows and those that begin with #."""

    def __init__(self, path: Path, name: str) -> None:
        """Read the head. Raises `FileRefused` naming the file as `name`."""
        self._name, self._text = name, read_text(path, name, most_bytes=_MOST_BYTES)
        self.columns: list[str] = []
        self.lines: list[int] = []  # of the rows
        self._cells = self._read()
        self._head, cells = next(self._cells, (0, []))
        self.columns = [cell.strip() for cell in cells]
        if not cells:
            self.refuse(1, "", "has no rows; it must be a table with a head and at least one row")
        for index, column in enumerate(self.columns):
            if column in self.columns[:index]:
                self.refuse(self._head, column, "the table has this column twice; take one out")

    def _read(self) -> Iterator[tuple[int, list[str]]]:
        lines = ("\n" if line.startswith("#") else line for line in StringIO(self._text, newline=""))
        reader = csv.reader(lines, strict=True)
        try:
            for cells in reader:
                if reader.line_num > _MOST_LINES:
                    self.refuse(reader.line_num, "", f"has more than {_MOST_LINES} lines; cut a window out of it")
                if any(cell.strip() for cell in cells):
                    yield reader.line_num, cells
        except csv.Error as error:
            self.refuse(reader.line_num, "", f"{error}; it must be a table of comma-separated values")

    def one_of(self, columns: Sequence[str], what: str) -> str:
        """Return the one that the table has, and refuse it if it has none or several."""
        found = [column for column in columns if column in self.columns]
        if len(found) != 1:
            have = ",".join(self.columns)[:200]
            self.refuse(self._head, "", f"has columns {have!r}; {what} must be one of {', '.join(columns)}")
        return found[0]

    def rows(self, kind: type[_Row], **columns: str) -> list[_Row]:
        """Convert all rows. `columns`: of fields whose columns have other names. Raises `FileRefused` for bad cells."""
        hints = get_type_hints(kind, include_extras=True)
        named = {columns.get(field, field): field for field in kind.__struct_fields__}
        if missing := [column for column in named if column not in self.columns]:
            have, want = ",".join(self.columns)[:200], ",".join(named)
            self.refuse(self._head, missing[0], f"is no column; the table has {have!r} and needs {want!r}")
        found: list[_Row] = []
        problems: list[Problem] = []
        for line, cells in self._cells:
            self.lines.append(line)
            if len(cells) != len(self.columns):
                told = f"has {len(cells)} cells; the head has {len(self.columns)} columns; the row must have as many"
                problems.append(Problem(self._name, line, 0, "", told))
            else:
                texts = {
                    named[one]: cell.strip() for one, cell in zip(self.columns, cells, strict=True) if one in named
                }
                try:
                    found.append(msgspec.convert(texts, kind, strict=False))
                except msgspec.ValidationError:
                    for column, field in named.items():
                        if told := _wrong(texts[field], hints[field]):
                            problems.append(Problem(self._name, line, self._position(column, cells), column, told))
            if len(problems) >= MOST_PROBLEMS:
                break
        if problems:
            raise FileRefused(problems[:MOST_PROBLEMS])
        if not found:
            self.refuse(1, "", "has no rows; it must be a table with a head and at least one row")
        return found

    def rising(self, values: Sequence[float], column: str, *, strictly: bool = False) -> None:
        """Refuse the first row whose value is less than the one before, or as large where they must rise."""
        for index, (before, value) in enumerate(pairwise(values)):
            if value < before or (strictly and value == before):
                told = f"is {value:.12g} after {before:.12g}"
                self.refuse(self.lines[index + 1], column, f"{told}; rows must be sorted by {column}")

    def refuse(self, line: int, column: str, text: str) -> NoReturn:
        place = 0
        if column in self.columns and line != self._head:
            place = self._position(
                column, next(islice(StringIO(self._text, newline=""), line - 1, None), "").split(",")
            )
        raise FileRefused([Problem(self._name, line, place, column, text)])

    def refuse_all(self, text: str) -> NoReturn:
        self.refuse(1, "", text)

    def _position(self, column: str, cells: Sequence[str]) -> int:
        """The character at which a cell begins, where no cell before it is quoted; else 0."""
        before = cells[: self.columns.index(column)]
        return 0 if any('"' in cell or "," in cell for cell in before) else 1 + sum(len(cell) + 1 for cell in before)


def _wrong(text: str, hint: Any) -> str:
    """What is wrong with a cell; nothing if it is a good one."""
    try:
        msgspec.convert(text, hint, strict=False)
    except msgspec.ValidationError:
        told = next((one.description for one in get_args(hint)[1:] if isinstance(one, Meta) and one.description), None)
        return f"is {shown(text)}; it must be {told or wanted(hint)}"
    return ""


class KnownTurn(NamedTuple):
    """One request to an engine. Lengths in tokens."""

    prompt: int  # the whole context
    response: int
    wait_s: float  # until the episode's next turn


class KnownTurns(Struct, frozen=True):
    """steps -> groups -> samples -> turns. Each has at least one of the next."""

    steps: tuple[tuple[tuple[tuple[KnownTurn, ...], ...], ...], ...]


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


class _Price(Struct):
    t_s: _Seconds
    dollars_per_hour: Annotated[float, Meta(ge=0, le=1e6)]  # no machine costs more


def fixed_price(dollars_per_hour: float) -> PriceTable:
    return PriceTable((0.0,), (dollars_per_hour,))


def read_prices(path: Path, name: str) -> PriceTable:
    """Read `t_s,dollars_per_hour`. Raises `FileRefused` naming the file as `name`."""
    table = CsvTable(path, name)
    found = table.rows(_Price)
    table.rising([one.t_s for one in found], "t_s", strictly=True)
    return PriceTable(tuple(one.t_s for one in found), tuple(one.dollars_per_hour for one in found))


#: Names of a value's column.
_VALUES: Final = ("output_tokens", "tokens", "seconds", "turns", "value")


class _Quantile(Struct):
    share: _Share
    value: Annotated[float, Meta(ge=0, le=1e9)]


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
    table = CsvTable(path, name)
    value = table.one_of(_VALUES, "the values' column")
    share = table.one_of(("quantile", "cdf"), "the shares' column")
    found = table.rows(_Quantile, share=share, value=value)
    table.rising([one.share for one in found], share)
    table.rising([one.value for one in found], value)
    distinct = {one.share: one.value for one in found}
    if len(distinct) < 2:
        table.refuse_all("has one share alone; it needs values at two different ones, to draw a line between them")
    return QuantileTable(tuple(distinct), tuple(distinct.values()), share == "quantile")


#: More machines than any trace has.
_MOST: Final = 20_000
#: Arrivals and losses of a file of counts.
_MOST_CHANGES: Final = 1_000_000


class _Event(Struct):
    t_s: _Seconds
    event: Literal["add", "remove"]
    node: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$", description="1 to 64 of A-Z a-z 0-9 . _ -")]


class _Count(Struct):
    t_s: _Seconds
    count: Annotated[int, Meta(ge=0, le=_MOST)]


class TraceEvent(Struct, frozen=True, gc=False):
    at_s: float
    joins: bool
    node: str


class SpotTrace(Struct, frozen=True):
    """A recorded fleet, either of named machines or of how many there were. One of the two is empty."""

    events: tuple[TraceEvent, ...] = ()
    counts: tuple[tuple[float, int], ...] = ()  # (second, machines from then on)

    @property
    def end_s(self) -> float:
        return self.events[-1].at_s if self.events else self.counts[-1][0]

    def in_order(self, draw: Random) -> list[TraceEvent]:
        """All events in order of time; at one instant losses come before joins.

        Where machines have no names, `draw` says which of them go.
        """
        events = self.events or tuple(_named(self.counts, draw))
        return sorted(events, key=lambda event: (event.at_s, event.joins))


def _named(counts: tuple[tuple[float, int], ...], draw: Random) -> Iterator[TraceEvent]:
    alive: list[str] = []
    named = 0
    for at_s, count in counts:
        while len(alive) > count:
            yield TraceEvent(at_s, False, alive.pop(draw.randrange(len(alive))))
        while len(alive) < count:
            alive.append(f"{named}")
            yield TraceEvent(at_s, True, alive[-1])
            named += 1


def read_spot_trace(path: Path, name: str) -> SpotTrace:
    """Read events (`t_s,event,node`) or counts (`t_s,count`). Raises `FileRefused` naming the file as `name`."""
    table = CsvTable(path, name)
    if "count" not in table.columns:
        events = [TraceEvent(one.t_s, one.event == "add", one.node) for one in table.rows(_Event)]
        table.rising([event.at_s for event in events], "t_s")
        _check_presence(table, events)
        return SpotTrace(events=tuple(events))
    counts = [(one.t_s, one.count) for one in table.rows(_Count)]
    table.rising([at for at, _ in counts], "t_s")
    if sum(abs(after - before) for (_, before), (_, after) in pairwise(counts)) > _MOST_CHANGES:
        table.refuse_all(f"more than {_MOST_CHANGES} machines come and go; cut a window out of it")
    if not any(count for _, count in counts):
        table.refuse_all("no machine ever joins; there is nothing to simulate")
    return SpotTrace(counts=tuple(dict(counts).items()))  # of one instant the last row counts


def _check_presence(table: CsvTable, events: list[TraceEvent]) -> None:
    """Refuse machines that join twice or leave without having joined, and too many of them."""
    alive: set[str] = set()
    numbered = zip(table.lines, events, strict=True)
    for line, event in sorted(numbered, key=lambda pair: (pair[1].at_s, pair[1].joins)):
        if event.joins == (event.node in alive):
            told = "joins, but is there already" if event.joins else "leaves, but is not there"
            table.refuse(line, "node", f"{event.node!r} {told}; correct the row or take it out")
        (alive.add if event.joins else alive.discard)(event.node)
        if len(alive) > _MOST:
            table.refuse(line, "node", f"more than {_MOST} machines are there; take a share of them out of the file")
    if not any(event.joins for event in events):
        table.refuse_all("no machine ever joins; there is nothing to simulate")


#: A worker that is slower yet is as good as not lent.
_SLOWEST: Final = 0.01


class _Grant(Struct):
    t_s: _Seconds
    share: _Share


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
    table = CsvTable(path, name)
    *spells, end = table.rows(_Grant)
    table.rising([one.t_s for one in (*spells, end)], "t_s", strictly=True)
    if not spells:
        table.refuse_all("has one row; the last one only ends the tape, so add another")
    if spells[0].t_s > 0:
        table.refuse(table.lines[0], "t_s", "must be 0 in the first row")
    for line, one in zip(table.lines, spells, strict=False):
        if 0.0 < one.share < _SLOWEST:
            table.refuse(line, "share", f"is {one.share:.12g}; it must be 0, or from {_SLOWEST} to 1")
    if not any(one.share for one in spells):
        table.refuse_all("no share is above 0; leave out machines that are never lent")
    return GrantTape(tuple(one.t_s for one in spells), tuple(one.share for one in spells), end.t_s)


class InputTables(Struct, frozen=True, kw_only=True):
    spots: dict[str, SpotTrace] = {}
    quantiles: dict[str, QuantileTable] = {}
    prices: dict[str, PriceTable] = {}
    grants: dict[str, GrantTape] = {}
    known: dict[str, KnownTurns] = {}  # by run: it was recorded, and nothing of its work is drawn
