"""Defines how files are refused: by file, line, column, field and remedy."""

from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from ebbtide.errors import InvalidRequest

#: Told at once. Reading ends there.
MOST_PROBLEMS: Final = 20


class Problem(Struct, frozen=True, order=True):
    """One thing that is wrong. Lines and columns count from 1; 0 means the whole file, or the whole line."""

    file: str
    line: int
    column: int
    field: str
    text: str  # what is wrong, and the remedy

    def __str__(self) -> str:
        place = ":".join([self.file, *(str(number) for number in (self.line, self.column) if number)])
        return f"{place}: {self.field}: {self.text}" if self.field else f"{place}: {self.text}"


class FileRefused(InvalidRequest):
    """A file is wrong, or one that it names. The text has a line for each problem."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(sorted(set(problems)))
        lines = [str(problem) for problem in self.problems]
        if len(lines) >= MOST_PROBLEMS:
            lines.append(f"{self.problems[-1].file}: further problems are not listed")
        super().__init__("\n".join(lines))


class UnreadableFile(FileRefused):
    """A file is not there, is none, or has no text. What names it is wrong, more than what is in it."""
