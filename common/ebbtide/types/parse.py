"""Parses mappings from outside (TOML, JSON, environment) into records. Its errors name the field."""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from ebbtide.errors import InvalidRequest

T = TypeVar("T")
_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<where>[^`]*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`")
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`")


def parse(kind: type[T], data: Mapping[str, Any], *, strict: bool = True) -> T:
    """Build the record `kind` from `data`. `strict=False` also reads numbers and booleans from strings.

    Raises `InvalidRequest` naming the field for unknown, missing, ill-typed or out-of-range values.
    """
    try:
        return msgspec.convert(data, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from None


def _named(text: str) -> InvalidRequest:
    match = _AT.match(text)
    what, where = (match["what"], match["where"] or "") if match else (text, "")
    for pattern, message in ((_UNKNOWN, "unknown key"), (_MISSING, "is required")):
        if found := pattern.search(what):
            return InvalidRequest(message, field=".".join(part for part in (where, found["name"]) if part))
    return InvalidRequest(what[0].lower() + what[1:], field=where)
