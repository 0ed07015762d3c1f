"""Reads a scenario's TOML, with the scenarios that it extends, and knows where each value stands."""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ebbtide.simulator.scenario.reading.toml_places import Offsets, TomlPath, excess, offsets, place_at
from ebbtide.simulator.scenario.refusals import MOST_PROBLEMS, Problem, ScenarioRefused, UnreadableFile
from ebbtide.simulator.scenario.text_files import read_text

#: 200 runs have their place in it, and are read within 50 ms. Tables belong into files of their own.
_MOST_BYTES: Final = 48 << 10
#: A scenario that extends one that extends one, and so on.
_LONGEST_CHAIN: Final = 8
_WHERE: Final = re.compile(r" \((?:at line (?P<line>\d+), column (?P<column>\d+)|at end of document)\)$")
#: What probably helps, by what `tomllib` says.
_REMEDIES: Final = {
    "Invalid value": "texts stand in quotes; numbers, true and false do not",
    "Expected '=' after a key": "each line is KEY = VALUE, a [table] or a comment after #",
    "Invalid statement": "each line is KEY = VALUE, a [table] or a comment after #",
    "Cannot overwrite a value": "the key stands there twice; take one out",
    "Cannot declare": "the table stands there twice; write [[fleet]] for each pool and [[run]] for each run",
    "Cannot mutate": "the table is complete already; take the key into it",
    "Expected newline or end of document": "a line has one value; put what follows on the next one",
    "Unclosed": "close the bracket",
    "Unterminated": "close the quotes",
    "Expected": "add what is missing there",
    "Illegal character": "texts of several lines stand in triple quotes",
    "Unescaped": "write a backslash as two, or the text in single quotes",
}


class ScenarioSource:
    """A scenario's table, in which the file's own top-level keys go before those of the scenario that it extends."""

    def __init__(self, path: Path, shown: str | None = None, text: str | None = None) -> None:
        """Read from a path, or take a text that has one. Raises `ScenarioRefused`."""
        self.folder = path.parent
        self.name = shown or str(path)
        self.table: dict[str, Any] = {}
        self._problems: list[Problem] = []
        self._files: dict[str, _TomlFile] = {}  # by top-level key
        self._main = self._add(path, self.name, text, ())

    def _add(self, path: Path, name: str, text: str | None, chain: tuple[str, ...]) -> "_TomlFile":
        file = _TomlFile(name, read_text(path, name, most_bytes=_MOST_BYTES) if text is None else text)
        for key, value in file.table.items():
            if key not in self.table:
                self.table[key], self._files[key] = value, file
        base = file.table.get("extends", "")
        if isinstance(base, str) and base:
            self._extend(file, base, (*chain, path.name))
        return file

    def _extend(self, file: "_TomlFile", base: str, chain: tuple[str, ...]) -> None:
        if Path(base).name != base:
            raise ScenarioRefused([file.problem(("extends",), "must be the name of a file in the same folder")])
        if base in chain:
            circle = " -> ".join([*chain[chain.index(base) :], base])
            raise ScenarioRefused([file.problem(("extends",), f"goes in a circle ({circle}); take one of them out")])
        if len(chain) >= _LONGEST_CHAIN:
            told = f"is a chain of more than {_LONGEST_CHAIN} files; put what they have in common into one"
            raise ScenarioRefused([file.problem(("extends",), told)])
        try:
            self._add(self.folder / base, self.shown(base), None, chain)
        except UnreadableFile as error:
            told = "; ".join(problem.text for problem in error.problems)
            raise ScenarioRefused([file.problem(("extends",), f"{base!r} {told}")]) from None

    def shown(self, file: str) -> str:
        """How people know a file that the scenario names."""
        return str(Path(self.name).parent / file)

    def note(self, path: TomlPath, text: str, key: bool = False) -> None:
        """Note a problem at a value, or at its key. Raises `ScenarioRefused` once there are enough."""
        file = self._files.get(str(path[0]), self._main) if path else self._main
        self.add(file.problem(path, text, key))

    def add(self, *problems: Problem) -> None:
        self._problems += problems
        if len(self._problems) >= MOST_PROBLEMS:
            raise ScenarioRefused(self._problems[:MOST_PROBLEMS])

    def refuse_noted(self) -> None:
        """Raise `ScenarioRefused` if there were problems."""
        if self._problems:
            raise ScenarioRefused(self._problems)


class _TomlFile:
    def __init__(self, name: str, text: str) -> None:
        self._name, self._text = name, text.replace("\r\n", "\n")
        self._offsets: dict[TomlPath, Offsets] | None = None
        if found := excess(text):
            place, told = found
            raise ScenarioRefused([Problem(name, place.line, place.column, "", told)])
        try:
            self.table: Mapping[str, Any] = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise ScenarioRefused([self._syntax(str(error))]) from None

    def _syntax(self, told: str) -> Problem:
        found = _WHERE.search(told)
        what = told[: found.start()] if found else told
        remedy = next((remedy for start, remedy in _REMEDIES.items() if what.startswith(start)), "correct it")
        if found and found["line"]:
            line, column = int(found["line"]), int(found["column"])
        else:
            line, column = self._text.count("\n") + 1, 0
        return Problem(self._name, line, column, "", f"{what[:200]}; {remedy}")

    def problem(self, path: TomlPath, text: str, key: bool = False) -> Problem:
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
