"""Reads files of text that somebody named, and refuses what is wrong in them: by file, line, column, field and remedy.

`read_text` refuses what is no text. `TomlFile` parses a TOML text, and knows where each of its values stands, which
`tomllib` does not return. Texts that nobody needs, and that make parsers slow or deep, are refused beforehand.
`checked` compares values with a record's types, and lists everything that is wrong at once.
"""

import difflib
import os
import re
import stat
import tomllib
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache
from math import isfinite
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import NODEFAULT, Meta, Struct

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


def read_text(path: Path, name: str, *, most_bytes: int, pipes: bool = False) -> str:
    """Read a regular file in UTF-8, or with `pipes` a pipe to its end. Raises `FileRefused` naming the file as `name`.

    If there is no such file, or it is too large, that is an `UnreadableFile`.
    """
    try:
        # Pipes and devices could block, or never end: the file is opened without waiting and looked at first.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (0 if pipes else os.O_NONBLOCK))
        try:
            mode = os.fstat(handle).st_mode
            regular = stat.S_ISREG(mode) or (pipes and stat.S_ISFIFO(mode))
            data = _read(handle, most_bytes + 1) if regular else b""
        finally:
            os.close(handle)
    except (OSError, ValueError) as error:
        told = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise _unreadable(name, f"cannot be read ({told}); check its path and permissions") from None
    if not regular:
        raise _unreadable(name, "is no regular file; name a file of text")
    if len(data) > most_bytes:
        raise _unreadable(name, f"is larger than {most_bytes} bytes; leave out what is not needed")
    return _decoded(data, name)


def _read(handle: int, most_bytes: int) -> bytes:
    parts: list[bytes] = []
    while most_bytes > 0 and (part := os.read(handle, most_bytes)):
        parts.append(part)
        most_bytes -= len(part)
    return b"".join(parts)


def _decoded(data: bytes, name: str) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise _refused_text(name, "is encoded in UTF-16; save it in UTF-8")
    try:
        text = data.removeprefix(b"\xef\xbb\xbf").decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        raise _refused_text(name, "is not encoded in UTF-8; save it in UTF-8", line, column) from None
    if (at := text.find("\0")) >= 0:
        raise _refused_text(
            name, "has a NUL character; take it out", text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)
        )
    return text


def _refused_text(name: str, text: str, line: int = 1, column: int = 0) -> FileRefused:
    return FileRefused([Problem(name, line, column, "", text)])


def _unreadable(name: str, text: str) -> UnreadableFile:
    return UnreadableFile([Problem(name, 0, 0, "", text)])


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
_LEXEMES: Final = re.compile(
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
    for token in _LEXEMES.finditer(text):
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


#: Notes a problem at a path; the last argument tells whether the key is wrong, not the value.
Note = Callable[[TomlPath, str, bool], None]
#: Longer names are no slips of the keyboard.
_LONGEST_NAME: Final = 64


class OrTable(NamedTuple):
    """Annotates a text that a file may also state as a table: the text of that record."""

    record: type[Struct]


_KINDS: Final = {int: "a whole number", float: "a number", str: "a text in quotes", bool: "true or false"}


def checked(kind: type[Struct], table: Mapping[str, Any], path: TomlPath, note: Note) -> dict[str, Any]:
    """Check a table that shall become a record of `kind`, and return it without shorthands.

    What is returned converts to the record if nothing was noted.
    """
    hints, found = _hints(kind), dict[str, Any]()
    for key, value in table.items():
        if key in hints:
            found[key] = _value(hints[key], value, (*path, key), note)
        else:
            note((*path, key), f"is unknown{suggestion(key, hints)}", True)
    for name in _required(kind):
        if name not in table:
            note((*path, name), f"is missing; add it, {wanted(hints[name])}", True)
    return found


def suggestion(name: str, known: Mapping[str, Any] | list[str]) -> str:
    """A remedy for a name that does not exist: the one that was probably meant, or all."""
    close = difflib.get_close_matches(name, list(known), n=1) if len(name) <= _LONGEST_NAME else []
    return f"; did you mean {close[0]}?" if close else f"; known are {', '.join(known) or 'none'}"


def _value(hint: Any, value: Any, path: TomlPath, note: Note) -> Any:
    bare, _ = _bare(hint)
    if isinstance(bare, type) and issubclass(bare, Struct):
        return _record(bare, value, path, note)
    if isinstance(value, dict) and (table := _table_of(hint)) is not None:
        return _text_of(table, value, path, note)
    if get_origin(bare) is tuple and isinstance(value, list):
        inner = get_args(bare)[0]
        _check_size(hint, len(value), path, note)
        return [_value(inner, one, (*path, index), note) for index, one in enumerate(value)]
    if get_origin(bare) is dict and isinstance(value, dict):
        inner = get_args(bare)[1]
        return {key: _value(inner, one, (*path, key), note) for key, one in value.items()}
    try:
        made = msgspec.convert(value, hint, strict=True)
    except (msgspec.ValidationError, OverflowError):
        made = NODEFAULT
    if isinstance(made, Enum) and made.value != value:  # what stored records may say
        made = NODEFAULT
    if made is NODEFAULT or (isinstance(made, float) and not isfinite(made)):
        note(path, f"is {shown(value)}; it must be {wanted(hint)}{_meant(bare, value)}", False)
    return value


def _check_size(hint: Any, size: int, path: TomlPath, note: Note) -> None:
    """Check how many entries an array has."""
    for meta in _bare(hint)[1]:
        if meta.min_length is not None and size < meta.min_length:
            note(path, f"is empty; it needs at least {meta.min_length}", False)
        if meta.max_length is not None and size > meta.max_length:
            note(path, f"has {size} entries; it must have at most {meta.max_length}", False)


def _record(kind: type[Struct], value: Any, path: TomlPath, note: Note) -> Any:
    short: dict[type, str] = getattr(kind, "shorthand", {})
    if type(value) in short:
        key = short[type(value)]
        return {key: _value(_hints(kind)[key], value, path, note)}
    if isinstance(value, dict):
        return checked(kind, value, path, note)
    instead = [_KINDS[one] for one in short if one is not float]
    note(path, f"is {shown(value)}; it must be {' or '.join(['a table', *instead])}", False)
    return value


def _table_of(hint: Any) -> type[Struct] | None:
    return next((arg.record for arg in get_args(hint) if isinstance(arg, OrTable)), None)


def _text_of(kind: type[Struct], table: Mapping[str, Any], path: TomlPath, note: Note) -> Any:
    found = checked(kind, table, path, note)
    try:
        return str(msgspec.convert(found, kind))
    except msgspec.ValidationError:  # which was noted
        return table


def _bare(hint: Any) -> tuple[Any, list[Meta]]:
    """The type inside `Annotated` and `| None`, and its bounds."""
    if get_origin(hint) is Annotated:
        inner, metas = _bare(get_args(hint)[0])
        return inner, [*metas, *(meta for meta in get_args(hint)[1:] if isinstance(meta, Meta))]
    if get_origin(hint) in {Union, UnionType}:
        rest = [arg for arg in get_args(hint) if arg is not NoneType]
        if len(rest) == 1:
            return _bare(rest[0])
    return hint, []


@cache
def _hints(kind: type[Struct]) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in msgspec.structs.fields(kind)}


@cache
def _required(kind: type[Struct]) -> tuple[str, ...]:
    return tuple(field.name for field in msgspec.structs.fields(kind) if field.required)


def wanted(hint: Any) -> str:
    """Say in words what a value must be."""
    bare, metas = _bare(hint)
    if words := _words(bare):
        return f"one of {', '.join(words)}"
    if get_origin(bare) is tuple:
        tables = isinstance(get_args(bare)[0], type) and issubclass(get_args(bare)[0], Struct)
        return "an array of tables, each under a name in [[...]]" if tables else "an array"
    if get_origin(bare) is dict or (isinstance(bare, type) and issubclass(bare, Struct)):
        return "a table"
    if get_origin(bare) in {Union, UnionType}:
        return " or ".join(_KINDS.get(one, "a value") for one in get_args(bare))
    if any(meta.pattern for meta in metas):
        return "1 to 64 of A-Z a-z 0-9 _ - in quotes, with a letter or digit first"
    or_table = "" if _table_of(hint) is None else ", or a table"
    return _KINDS.get(bare, "a value") + "".join(_range(meta) for meta in metas) + or_table


def _range(meta: Meta) -> str:
    if meta.max_length is not None:
        return f" with {meta.min_length or 0} to {meta.max_length} characters"
    low = f"from {meta.ge:.12g}" if meta.ge is not None else f"above {meta.gt:.12g}" if meta.gt is not None else ""
    high = f"to {meta.le:.12g}" if meta.le is not None else f"below {meta.lt:.12g}" if meta.lt is not None else ""
    joint = " and " if low.startswith("above") and high else " "
    return f" {joint.join(filter(None, (low, high)))}" if low or high else ""


def _meant(bare: Any, value: Any) -> str:
    words = _words(bare)
    if not words or not isinstance(value, str) or len(value) > _LONGEST_NAME:
        return ""
    close = difflib.get_close_matches(value, words, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _words(bare: Any) -> list[str]:
    """The values of a type that has only some."""
    if isinstance(bare, type) and issubclass(bare, Enum):
        return [str(member.value) for member in bare]
    return [str(arg) for arg in get_args(bare)] if get_origin(bare) is Literal else []


def shown(value: Any) -> str:
    """A value as the file may have it, shortened."""
    if isinstance(value, dict | list):
        return "a table" if isinstance(value, dict) else "an array"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and abs(value) >= 10**15:
        return f"{'-' if value < 0 else ''}1e{len(str(abs(value))) - 1} or more"
    text = repr(value) if isinstance(value, str | int | float) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
