"""Parses an object inside a body, so that errors name the field where the client finds it."""

from collections.abc import Mapping
from typing import Any, TypeVar

from ebbtide.errors import InvalidRequest
from ebbtide.types.parse import parse

T = TypeVar("T")


def parsed_inside(kind: type[T], content: Mapping[str, Any], inside: str) -> T:
    """`parse`, for the object at the field `inside` of a body."""
    try:
        return parse(kind, content)
    except InvalidRequest as error:
        text = str(error).removeprefix(f"{error.field}: ")
        raise InvalidRequest(text, field=f"{inside}.{error.field}" if error.field else inside) from None
