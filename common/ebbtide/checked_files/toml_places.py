"""Finds where keys and values stand in a TOML text that parses. `tomllib` does not tell.

Texts that nobody needs, and that make parsers slow or deep, are found by `excess` beforehand.
"""

import re
import tomllib
from typing import Any, Final, TypeAlias

from msgspec import Struct

#: Keys and indices from the root to a value.
TomlPath: TypeAlias = tuple[str | int, ...]

_STRING: Final = (
    r'"""(?:[^"\\]|\\.|"(?!""))*"{3,5}|' + r"'''(?:[^']|'(?!''))*'{3,5}|" + r'"(?:[^"\\\n]|\\.)*"|' + r"'[^'\n]*'"
)
_STRINGS: Final = re.compile(_STRING, re.DOTALL)
_SPACE: Final = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
_BLANKS: Final = re.compile(r"[ \t]*")
_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")
#: The plain begin of a pair.
_SIMPLE: Final = re.compile(r"([A-Za-z0-9_-]+)[ \t]*=[ \t]*")
_SCALAR: Final = re.compile(r"\d{4}-\d\d-\d\d \d\d:[^\s,\]}#]*|[^\s,\]}#]+")
#: Nesting of arrays and inline tables. Scenarios and specs need three levels; parsers recurse.
_DEEPEST: Final = 32
#: Parts of a dotted key. Scenarios and specs need three; `tomllib` takes time that grows with their square.
_MOST_PARTS: Final = 16
#: Digits of a number. No bound needs as many, and Python refuses to convert 4,300.
_MOST_DIGITS: Final = 400
_TOKENS: Final = re.compile(
    rf"(?P<string>{_STRING})|#[^\n]*|(?P<open>[\[{{])|(?P<close>[\]}}])|(?P<dot>\.)|(?P<end>[=,\n])"
    rf"|(?P<digits>[+-]?[0-9][0-9A-Za-z_]{{{_MOST_DIGITS},}})|[A-Za-z0-9_-]+",
    re.DOTALL,
)


class Place(Struct, frozen=True):
    """Lines and columns from 1."""

    line: int
    column: int


#: Where a key and its value begin, in characters from 0. Headers of tables have both at their bracket.
Offsets: TypeAlias = tuple[int, int]


def place_at(text: str, at: int) -> Place:
    return Place(text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at))


def excess(text: str) -> tuple[Place, str] | None:
    """Find the first part that is too deep, too long a number or too long a key: its place, and what is wrong."""
    depth = dots = 0
    for token in _TOKENS.finditer(text):
        kind = token.lastgroup
        depth = max(0, depth + (kind == "open") - (kind == "close"))
        dots = 0 if kind == "end" else dots + (kind == "dot")
        if depth > _DEEPEST:
            return place_at(text, token.start()), f"is nested more than {_DEEPEST} levels deep; write it flatter"
        if dots >= _MOST_PARTS:
            return place_at(text, token.start()), f"a key has more than {_MOST_PARTS} parts; write it with tables"
        if kind == "digits":
            return place_at(text, token.start()), f"a number has more than {_MOST_DIGITS} digits; write a smaller one"
    return None


def offsets(text: str) -> dict[TomlPath, Offsets]:
    r"""Find all keys, values and tables of a TOML text that `tomllib` has parsed. Its lines must end in `\n` alone."""
    scan = _Scan(text)
    scan.document()
    return scan.found


class _Scan:
    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self.found: dict[TomlPath, Offsets] = {}
        self._tables: dict[TomlPath, int] = {}  # arrays of tables, and how many there are

    def document(self) -> None:
        table: TomlPath = ()
        self._skip(_SPACE)
        while self._at < len(self._text):
            if self._text[self._at] == "[":
                table = self._header()
            else:
                self._pair(table)
            self._skip(_SPACE)

    def _skip(self, pattern: re.Pattern[str]) -> None:
        if match := pattern.match(self._text, self._at):
            self._at = match.end()

    def _eat(self, text: str) -> bool:
        there = self._text.startswith(text, self._at)
        self._at += len(text) if there else 0
        return there

    def _header(self) -> TomlPath:
        start = self._at
        array = self._eat("[[") or not self._eat("[")
        path = self._within((), self._key())
        if array:
            plain = self._without_last_index(path)
            index = self._tables[plain] = self._tables.get(plain, -1) + 1
            path = (*plain, index)
        self._eat("]]" if array else "]")
        self.found.setdefault(path, (start, start))
        return path

    def _without_last_index(self, path: TomlPath) -> TomlPath:
        return path[:-1] if path and isinstance(path[-1], int) else path

    def _within(self, path: TomlPath, keys: list[str]) -> TomlPath:
        """Follow keys from a table; a key of an array of tables means its last one."""
        for key in keys:
            path = (*path, key)
            if path in self._tables:
                path = (*path, self._tables[path])
        return path

    def _key(self) -> list[str]:
        keys: list[str] = []
        while True:
            self._skip(_BLANKS)
            match = _STRINGS.match(self._text, self._at) or _BARE.match(self._text, self._at)
            if match is None:  # `tomllib` would have refused it
                self._at += 1
                return keys
            keys.append(_plain(match.group()))
            self._at = match.end()
            self._skip(_BLANKS)
            if not self._eat("."):
                return keys

    def _pair(self, table: TomlPath) -> None:
        start = self._at
        if simple := _SIMPLE.match(self._text, self._at):
            keys, self._at = [simple[1]], simple.end()
        else:
            keys = self._key()
            self._eat("=")
            self._skip(_BLANKS)
        value = self._at
        for length in range(1, len(keys)):
            self.found.setdefault((*table, *keys[:length]), (start, start))
        path = (*table, *keys)
        self.found[path] = (start, value)
        self._value(path)

    def _value(self, path: TomlPath) -> None:
        match self._text[self._at : self._at + 1]:
            case "[":
                self._array(path)
            case "{":
                self._inline(path)
            case '"' | "'":
                self._skip(_STRINGS)
            case _:
                self._skip(_SCALAR)

    def _array(self, path: TomlPath) -> None:
        index = 0
        self._at += 1
        self._skip(_SPACE)
        while self._at < len(self._text) and not self._eat("]"):
            start = self._at
            self.found[*path, index] = (start, start)
            self._value((*path, index))
            index += 1
            self._skip(_SPACE)
            self._eat(",")
            self._skip(_SPACE)

    def _inline(self, path: TomlPath) -> None:
        self._at += 1
        self._skip(_SPACE)
        while self._at < len(self._text) and not self._eat("}"):
            self._pair(path)
            self._skip(_SPACE)
            self._eat(",")
            self._skip(_SPACE)


def _plain(key: str) -> str:
    """A key as a parser reads it."""
    if key[0] not in {'"', "'"}:
        return key
    parsed: dict[str, Any] = tomllib.loads(f"{key} = 0")
    return next(iter(parsed))
