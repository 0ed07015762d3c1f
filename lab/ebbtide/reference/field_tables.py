"""Tables of the fields of msgspec structs: name, type with bounds, default, and the meaning that the source states.

A field's meaning is its comment in the source: the `#:` lines above it, and what follows `#` on its lines.
"""

import ast
import inspect
import io
import sys
import tokenize
from collections.abc import Iterator
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
from msgspec import NODEFAULT, Meta, Struct

from ebbtide.checked_files import OrTable

_NAMES: Final[dict[Any, str]] = {
    str: "text",
    bool: "true or false",
    int: "integer",
    float: "number",
    bytes: "bytes",
    Path: "path",
    dict: "table",
    Any: "any",
}
#: Greater bounds only keep nonsense out, and are not worth a reader's time.
_BEYOND: Final = 1e8
#: Ends of names that state a unit.
_UNITS: Final = {
    "_s": "seconds",
    "_ms": "ms",
    "_bytes": "bytes",
    "_mib": "MiB",
    "_tokens": "tokens",
    "_gbps": "Gbit/s",
    "_per_hour": "per hour",
}


class DocumentedField(NamedTuple):
    """A field as its file's writer sees it. `default` is empty where the field is required."""

    name: str
    kind: str
    default: str
    meaning: str
    struct: type[Struct] | None  # of a field that is a table with keys of its own


def documented(kind: type[Struct]) -> Iterator[DocumentedField]:
    """The fields of a struct in their order. Raises `ValueError` for one without a comment."""
    hints, comments = get_type_hints(kind, include_extras=True), _comments(kind)
    for info in msgspec.structs.fields(kind):
        struct = _struct(hints[info.name])
        if not comments.get(info.name) and struct is None:
            raise ValueError(f"{kind.__name__}.{info.name} has no comment that says what it is")
        unit = next((unit for end, unit in _UNITS.items() if info.name.endswith(end)), "")
        shown = type_text(hints[info.name])
        yield DocumentedField(
            info.encode_name,
            f"{shown}, {unit}" if unit else shown,
            _default(info),
            comments.get(info.name, ""),
            struct,
        )


def field_table(fields: list[DocumentedField], prefix: str = "") -> list[str]:
    """Lines of a Markdown table."""
    rows = [
        f"| `{prefix}{field.name}` | {field.kind} | {field.default or 'required'} | {cell(field.meaning)} |"
        for field in fields
    ]
    return ["| key | type | default | meaning |", "|---|---|---|---|", *rows, ""]


def paragraphs(kind: type) -> list[str]:
    """The docstring of a class, with a line for each paragraph, each followed by an empty one."""
    parts = inspect.cleandoc(kind.__doc__ or "").split("\n\n")
    return [line for part in parts for line in (" ".join(part.split()), "")]


def cell(text: str, *, sentence: bool = True) -> str:
    """A text as the cell of a table: in one line, and as a sentence."""
    text = " ".join(text.split()).replace("|", "\\|")
    if not sentence:
        return text
    if text and text[-1] not in ".:?!":
        text += "."
    return text[:1].upper() + text[1:]


def type_text(hint: Any) -> str:
    """A type with its bounds, for people."""
    if get_origin(hint) is Annotated:
        bare, *marks = get_args(hint)
        bounds = "".join(f", {text}" for mark in marks if isinstance(mark, Meta) and (text := _bounds(mark)))
        return type_text(bare) + bounds + (" or table" if any(isinstance(mark, OrTable) for mark in marks) else "")
    if get_origin(hint) is Literal:
        return either([f"`{value(choice)}`" for choice in get_args(hint)])
    if get_origin(hint) is tuple:
        return f"list of {type_text(get_args(hint)[0])}"
    if (parts := get_args(hint)) and NoneType in parts:
        return either([type_text(part) for part in parts if part is not NoneType])
    if isinstance(hint, type) and issubclass(hint, Enum):
        return either([f"`{value(one.value) if isinstance(one, str) else one.name.lower()}`" for one in hint])
    return _NAMES.get(get_origin(hint) or hint, "table")


def either(words: list[str]) -> str:
    """The words as a choice."""
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def value(given: Any) -> str:
    """A value as TOML has it."""
    if isinstance(given, bool):
        return str(given).lower()
    if isinstance(given, str):
        return f'"{given}"'
    return str(given)


def _default(info: msgspec.structs.FieldInfo) -> str:
    given = info.default if info.default is not NODEFAULT else info.default_factory
    if given is NODEFAULT:
        return ""
    if callable(given):
        given = given()
    if given in (None, "", (), {}) and not isinstance(given, bool | int | float):
        return "none"
    if isinstance(given, Struct):
        stated = {
            name: getattr(given, name)
            for name, usual in zip(given.__struct_fields__, _usual(type(given)), strict=True)
            if getattr(given, name) != usual
        }
        return f"`{', '.join(f'{name} = {value(one)}' for name, one in stated.items())}`" if stated else "its defaults"
    size = f" ({given >> 20} MiB)" if info.name.endswith("_bytes") and given and not given % (1 << 20) else ""
    return f"`{value(given)}`{size}"


def _usual(kind: type[Struct]) -> list[Any]:
    return [info.default for info in msgspec.structs.fields(kind)]


def _struct(hint: Any) -> type[Struct] | None:
    """The struct inside `Annotated`, `| None` and `tuple[..., ...]`."""
    if isinstance(hint, type) and issubclass(hint, Struct):
        return hint
    found = (_struct(part) for part in get_args(hint) if not isinstance(part, Meta))
    return next((one for one in found if one is not None), None)


def _bounds(mark: Meta) -> str:
    least = mark.ge if mark.ge is not None else mark.gt
    most = mark.le if mark.le is not None else mark.lt
    if most is not None and most >= _BEYOND:
        most = None
    if least is not None and most is not None and mark.gt is None and mark.lt is None:
        return f"{_number(least)} to {_number(most)}"
    parts = []
    if least is not None:
        parts.append(f"{'above' if mark.gt is not None else 'at least'} {_number(least)}")
    if most is not None:
        parts.append(f"{'below' if mark.lt is not None else 'at most'} {_number(most)}")
    return ", ".join(parts)


def _number(bound: float) -> str:
    return f"{bound:g}" if isinstance(bound, float) else str(bound)


@cache
def _comments(kind: type[Struct]) -> dict[str, str]:
    """Field -> its comments, of the struct and of those that it derives from."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        file = getattr(sys.modules.get(one.__module__), "__file__", None)
        if file and issubclass(one, Struct) and one is not Struct:
            found |= _in_source(Path(file).read_text(), one.__name__)
    return found


def _in_source(source: str, name: str) -> dict[str, str]:
    (body,) = [node.body for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name]
    tokens = [one for one in tokenize.generate_tokens(io.StringIO(source).readline) if one.type == tokenize.COMMENT]
    comments = {
        one.start: one.string.lstrip("#: ") for one in tokens if not one.string.startswith(("# noqa", "# type:"))
    }
    documenting = {one.start for one in tokens if one.string.startswith("#:")}
    above = {line: text for (line, column), text in comments.items() if column == 4 and (line, column) in documenting}
    found = {}
    for node in body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        lines, line, end = list[str](), node.lineno - 1, node.end_lineno or node.lineno
        while line in above:
            lines.insert(0, above[line])
            line -= 1
        lines += [text for (at, column), text in comments.items() if column > 4 and node.lineno <= at <= end]
        found[node.target.id] = " ".join(lines)
    return found
