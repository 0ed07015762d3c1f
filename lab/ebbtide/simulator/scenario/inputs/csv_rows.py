"""Reads tables of comma-separated values whose cells are asked for by what they should be.

A table is read within `read_rows`: problems gather, and all of them are raised at its end.
"""

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import StringIO
from itertools import islice, pairwise
from math import inf, isfinite
from pathlib import Path
from typing import Final, NoReturn, TypeVar

from ebbtide.checked_files.refusals import MOST_PROBLEMS, FileRefused, Problem
from ebbtide.checked_files.text_files import read_text

T = TypeVar("T")
#: A million requests are about 20 MB.
_MOST_BYTES: Final = 32 << 20
_MOST_LINES: Final = 1_000_000
#: Longest time in a table: three years in seconds.
_LONGEST_S: Final = 1e8
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


class CsvRows:
    """The rows of a table, read one by one, without empty ones and those that begin with #.

    Problems of cells gather until there are too many; those of the table are raised at once.
    """

    def __init__(self, name: str, text: str) -> None:
        self.name, self._text = name, text
        self.lines: list[int] = []  # of the rows that were read
        self.problems: list[Problem] = []
        self.columns: list[str] = []
        self._rows = self._read()
        self._head, cells = next(self._rows, (0, []))
        if not cells:
            self.refuse_all("has no rows; it must be a table with a head and at least one row")
        self.columns = [cell.strip() for cell in cells]
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

    def __iter__(self) -> Iterator["CsvRow"]:
        for line, cells in self._rows:
            self.lines.append(line)
            yield CsvRow(self, line, cells)
        if not self.lines:
            self.refuse_all("has no rows; it must be a table with a head and at least one row")

    def need(self, *columns: str) -> None:
        """Refuse a table that lacks one of them."""
        if missing := [column for column in columns if column not in self.columns]:
            have, want = ",".join(self.columns)[:200], ",".join(columns)
            self.refuse(self._head, missing[0], f"is no column; the table has {have!r} and needs {want!r}")

    def one_of(self, columns: Sequence[str], what: str) -> str:
        """Return the one that the table has, and refuse it if it has none or several."""
        found = [column for column in columns if column in self.columns]
        if len(found) != 1:
            have = ",".join(self.columns)[:200]
            self.refuse(self._head, "", f"has columns {have!r}; {what} must be one of {', '.join(columns)}")
        return found[0]

    def note(self, line: int, column: str, text: str, cells: list[str] | None = None) -> None:
        """Note a problem, and raise all of them once there are enough. `cells`: the line's, where they are known."""
        self.problems.append(Problem(self.name, line, self._position(line, column, cells), column, text))
        if len(self.problems) >= MOST_PROBLEMS:
            raise FileRefused(self.problems)

    def refuse(self, line: int, column: str, text: str) -> NoReturn:
        problem = Problem(self.name, line, self._position(line, column), column, text)
        raise FileRefused([*self.problems, problem])

    def refuse_all(self, text: str) -> NoReturn:
        self.refuse(1, "", text)

    def _position(self, line: int, column: str, cells: list[str] | None = None) -> int:
        """The character at which a cell begins, where no cell before it is quoted; else 0."""
        if column not in self.columns or line == self._head:
            return 0
        if cells is None:
            cells = next(islice(StringIO(self._text, newline=""), line - 1, None), "").split(",")
        before = cells[: self.columns.index(column)]
        return 0 if any('"' in cell or "," in cell for cell in before) else 1 + sum(len(cell) + 1 for cell in before)


class CsvRow:
    """One row. Cells that are not what they should be are noted, and replaced by something that is."""

    def __init__(self, rows: CsvRows, line: int, cells: list[str]) -> None:
        self._rows, self._line, self._cells = rows, line, cells
        if len(cells) != len(rows.columns):
            told = f"has {len(cells)} cells; the head has {len(rows.columns)} columns"
            rows.note(line, "", f"{told}; the row must have as many")

    def _note(self, column: str, text: str) -> None:
        self._rows.note(self._line, column, text, self._cells)

    def text(self, column: str) -> str:
        """The cell's text; none if that was noted."""
        index = self._rows.columns.index(column)
        if index >= len(self._cells):
            return ""
        text = self._cells[index].strip()
        if text and len(text) <= 200 and text.isprintable():
            return text
        self._note(column, "must be 1 to 200 printable characters")
        return ""

    def name(self, column: str) -> str:
        """A text that may become part of an id."""
        text = self.text(column)
        if text and not _NAME.fullmatch(text):
            self._note(column, f"is {_shown(text)}; it must be 1 to 64 of A-Z a-z 0-9 . _ -")
        return text

    def word(self, column: str, known: Mapping[str, T]) -> T:
        text = self.text(column)
        if text and text not in known:
            self._note(column, f"is {_shown(text)}; it must be {' or '.join(known)}")
        return known.get(text, next(iter(known.values())))

    def number(self, column: str, *, most: float = _LONGEST_S) -> float:
        text = self.text(column)
        try:
            value = float(text or 0)
        except ValueError:
            value = inf
        if not isfinite(value) or not 0 <= value <= most:
            self._note(column, f"is {_shown(text)}; it must be a number from 0 to {most:.12g}")
            return 0.0
        return value

    def whole(self, column: str, *, most: int) -> int:
        value = self.number(column, most=most)
        if value != int(value):
            self._note(column, f"is {value:.12g}; it must be a whole number")
        return int(value)


def rising(rows: CsvRows, values: Sequence[float], column: str, *, strictly: bool = False) -> None:
    """Note the first row whose value is less than the one before, or as large where they must rise."""
    if rows.problems:
        return
    for index, (before, value) in enumerate(pairwise(values)):
        if value < before or (strictly and value == before):
            told = f"is {value:.12g} after {before:.12g}"
            rows.note(rows.lines[index + 1], column, f"{told}; rows must be sorted by {column}")
            return


@contextmanager
def read_rows(path: Path, name: str) -> Iterator[CsvRows]:
    """Read a table, and raise what was noted. Raises `FileRefused` naming the file as `name`."""
    rows = CsvRows(name, read_text(path, name, most_bytes=_MOST_BYTES))
    yield rows
    if rows.problems:
        raise FileRefused(rows.problems)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
