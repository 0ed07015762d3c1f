"""Checks values from a file against a record's types, and lists everything that is wrong at once."""

import difflib
from collections.abc import Callable, Mapping
from functools import cache
from math import isfinite
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import NODEFAULT, Meta, Struct

from ebbtide.checked_files.toml_places import TomlPath

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
    if get_origin(bare) is Literal:
        return f"one of {', '.join(map(str, get_args(bare)))}"
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
    if get_origin(bare) is not Literal or not isinstance(value, str) or len(value) > _LONGEST_NAME:
        return ""
    close = difflib.get_close_matches(value, [str(arg) for arg in get_args(bare)], n=1)
    return f"; did you mean {close[0]}?" if close else ""


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
