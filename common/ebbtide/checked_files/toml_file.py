"""Parses a TOML text, and knows where each of its values stands."""

import re
import tomllib
from collections.abc import Mapping
from typing import Any, Final

from ebbtide.checked_files.refusals import FileRefused, Problem
from ebbtide.checked_files.toml_places import Offsets, TomlPath, excess, offsets, place_at

_WHERE: Final = re.compile(r" \((?:at line (?P<line>\d+), column (?P<column>\d+)|at end of document)\)$")
#: What probably helps, by what `tomllib` says.
_REMEDIES: Final = {
    "Invalid value": "texts stand in quotes; numbers, true and false do not",
    "Expected '=' after a key": "each line is KEY = VALUE, a [table] or a comment after #",
    "Invalid statement": "each line is KEY = VALUE, a [table] or a comment after #",
    "Cannot overwrite a value": "the key stands there twice; take one out",
    "Cannot declare": "the table stands there twice; take one out, or write [[...]] for each if there may be several",
    "Cannot mutate": "the table is complete already; take the key into it",
    "Expected newline or end of document": "a line has one value; put what follows on the next one",
    "Unclosed": "close the bracket",
    "Unterminated": "close the quotes",
    "Expected": "add what is missing there",
    "Illegal character": "texts of several lines stand in triple quotes",
    "Unescaped": "write a backslash as two, or the text in single quotes",
}


class TomlFile:
    """A text in TOML that people know as the file `name`."""

    def __init__(self, name: str, text: str) -> None:
        """Raises `FileRefused` with line, column and remedy for a text that is no TOML."""
        self._name, self._text = name, text.replace("\r\n", "\n")
        self._offsets: dict[TomlPath, Offsets] | None = None
        if found := excess(text):
            place, told = found
            raise FileRefused([Problem(name, place.line, place.column, "", told)])
        try:
            self.table: Mapping[str, Any] = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise FileRefused([self._syntax(str(error))]) from None

    def _syntax(self, told: str) -> Problem:
        found = _WHERE.search(told)
        what = told[: found.start()] if found else told
        remedy = next((remedy for start, remedy in _REMEDIES.items() if what.startswith(start)), "correct it")
        if found and found["line"]:
            line, column = int(found["line"]), int(found["column"])
        else:
            line, column = self._text.count("\n") + 1, 0
        return Problem(self._name, line, column, "", f"is no TOML: {what[:200]}; {remedy}")

    def problem(self, path: TomlPath, text: str, key: bool = False) -> Problem:
        """What is wrong with a value, or with its key. What is missing stands at the table that lacks it."""
        if self._offsets is None:
            self._offsets = offsets(self._text)
        known = len(path)
        while known and path[:known] not in self._offsets:
            known -= 1
        start, value = self._offsets[path[:known]] if known else (0, 0)
        place = place_at(self._text, start if key and known == len(path) else value)
        return Problem(self._name, place.line, place.column, _dotted(path), text)


def _dotted(path: TomlPath) -> str:
    """A path as people write it: `fleet[0].engine`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= 100 else text[:97] + "..."
