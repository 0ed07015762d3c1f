"""Reads a run's spec from a TOML file, and lists everything that is wrong in it at once."""

import re
from pathlib import Path
from typing import Final

import msgspec

from ebbtide.checked_files import MOST_PROBLEMS, FileRefused, Problem, TomlFile, TomlPath, checked, read_text
from ebbtide.errors import InvalidRequest
from ebbtide.types.run import RunSpec, spec_problems

NO_LORA: Final = "LoRA adapters are not supported yet; merge the adapter into its base model and give that"
#: How other trainers' files call their settings of adapters.
_OF_ADAPTERS: Final = re.compile(r"lora|peft|adapter", re.IGNORECASE)
#: A spec has at most 32 KiB without its comments.
_MOST_BYTES: Final = 256 << 10
_PART: Final = re.compile(r"\[(\d+)\]|([^.\[\]]+)")


class SpecFile:
    """A run's spec as somebody wrote it. `spec` is there if nothing was noted."""

    spec: RunSpec

    def __init__(self, path: Path) -> None:
        """Raises `FileRefused` for a file that cannot be read, or is no TOML."""
        self._file = TomlFile(str(path), read_text(path, str(path), most_bytes=_MOST_BYTES, pipes=True))
        self._problems: list[Problem] = []
        self._tables: set[str] = set()  # top-level keys below which something is wrong
        table = checked(RunSpec, self._file.table, (), self._note)
        try:
            self.spec = msgspec.convert(table, RunSpec)
        except msgspec.ValidationError:  # by values that were noted
            return
        wrong = set(self._tables)
        for problem in spec_problems(self.spec):
            # A default may stand for the key that has a slip.
            if str(_path(problem.field)[0]) not in wrong:
                self.note(problem)

    def note(self, problem: InvalidRequest) -> None:
        """Note a problem at the value of its field."""
        self._note(_path(problem.field), problem.text)

    @property
    def model(self) -> str:
        """The model that it names; empty if it names none."""
        model = self._file.table.get("model")
        return model if isinstance(model, str) else ""

    def refuse_noted(self) -> None:
        """Raises `FileRefused` if there were problems."""
        if self._problems:
            raise FileRefused(sorted(set(self._problems))[:MOST_PROBLEMS])

    def _note(self, path: TomlPath, text: str, key: bool = False) -> None:
        if key and _OF_ADAPTERS.search(str(path[-1])):
            text = NO_LORA
        self._tables.add(str(path[0]) if path else "")
        self._problems.append(self._file.problem(path, text, key))


def _path(field: str) -> TomlPath:
    """Keys and indices of a field such as `sampling.stop[0]`."""
    return tuple(int(index) if index else name for index, name in _PART.findall(field)) or ("",)
