"""Reads a scenario's TOML, with the scenarios that it extends, and knows where each value stands."""

from pathlib import Path
from typing import Any, Final

from ebbtide.checked_files import MOST_PROBLEMS, FileRefused, Problem, TomlFile, TomlPath, UnreadableFile, read_text

#: 200 runs have their place in it, and are read within 50 ms. Tables belong into files of their own.
_MOST_BYTES: Final = 48 << 10
#: A scenario that extends one that extends one, and so on.
_LONGEST_CHAIN: Final = 8


class ScenarioSource:
    """A scenario's table, in which the file's own top-level keys go before those of the scenario that it extends."""

    def __init__(self, path: Path, shown: str | None = None, text: str | None = None) -> None:
        """Read from a path, or take a text that has one. Raises `FileRefused`."""
        self.folder = path.parent
        self.name = shown or str(path)
        self.table: dict[str, Any] = {}
        self._problems: list[Problem] = []
        self._files: dict[str, TomlFile] = {}  # by top-level key
        self._main = self._add(path, self.name, text, ())

    def _add(self, path: Path, name: str, text: str | None, chain: tuple[str, ...]) -> "TomlFile":
        file = TomlFile(name, read_text(path, name, most_bytes=_MOST_BYTES) if text is None else text)
        for key, value in file.table.items():
            if key not in self.table:
                self.table[key], self._files[key] = value, file
        base = file.table.get("extends", "")
        if isinstance(base, str) and base:
            self._extend(file, base, (*chain, path.name))
        return file

    def _extend(self, file: "TomlFile", base: str, chain: tuple[str, ...]) -> None:
        if Path(base).name != base:
            raise FileRefused([file.problem(("extends",), "must be the name of a file in the same folder")])
        if base in chain:
            circle = " -> ".join([*chain[chain.index(base) :], base])
            raise FileRefused([file.problem(("extends",), f"goes in a circle ({circle}); take one of them out")])
        if len(chain) >= _LONGEST_CHAIN:
            told = f"is a chain of more than {_LONGEST_CHAIN} files; put what they have in common into one"
            raise FileRefused([file.problem(("extends",), told)])
        try:
            self._add(self.folder / base, self.shown(base), None, chain)
        except UnreadableFile as error:
            told = "; ".join(problem.text for problem in error.problems)
            raise FileRefused([file.problem(("extends",), f"{base!r} {told}")]) from None

    def shown(self, file: str) -> str:
        """How people know a file that the scenario names."""
        return str(Path(self.name).parent / file)

    def note(self, path: TomlPath, text: str, key: bool = False) -> None:
        """Note a problem at a value, or at its key. Raises `FileRefused` once there are enough."""
        file = self._files.get(str(path[0]), self._main) if path else self._main
        self.add(file.problem(path, text, key))

    def add(self, *problems: Problem) -> None:
        self._problems += problems
        if len(self._problems) >= MOST_PROBLEMS:
            raise FileRefused(self._problems[:MOST_PROBLEMS])

    def refuse_noted(self) -> None:
        """Raise `FileRefused` if there were problems."""
        if self._problems:
            raise FileRefused(self._problems)
