"""Converts records to messages and back by field name, and checks what comes in.

A plan is made once per pair of types: for each common field, its name and the step that converts its value to builtins.
Absent messages, absent optional scalars and enums of 0 become None, or the record's default. A `dict[str, Any]` is a
JSON string, empty for {}.
"""

import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from msgspec import Struct

from ebbtide.errors import InvalidRequest
from ebbtide.types.parse import parse

M = TypeVar("M", bound=Message)
R = TypeVar("R", bound=Struct)
Step = Callable[[Any], Any]
_FLOATS = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)


class _Refused(Exception):
    """A value that cannot be converted. It collects the path to its field on the way up."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.path = ""

    def under(self, name: str) -> "_Refused":
        self.path = f"{name}.{self.path}".rstrip(".").replace(".[", "[")
        return self


def to_proto(record: Struct, message_type: type[M]) -> M:
    """The message with the record's values. Raises `InvalidRequest` naming a field that the message cannot hold."""
    kind: Any = message_type
    try:
        made: M = kind(**_writer(kind, type(record))(record))
    except _Refused as error:
        raise InvalidRequest(str(error), field=error.path) from None
    except (ValueError, TypeError) as error:
        raise InvalidRequest(str(error), field=_unfit(record, kind)) from None
    return made


def from_proto(message: Message, record_type: type[R], *, field: str = "") -> R:
    """The checked record with the message's values.

    Raises `InvalidRequest` naming the bad field (its path below `field`): missing, out of bounds, not a member of its
    enum, not finite, or not a JSON object.
    """
    kind: Any = type(message)
    try:
        return parse(record_type, _reader(kind, record_type)(message))
    except _Refused as error:
        path, text = error.path, str(error)
    except InvalidRequest as error:
        path, text = error.field, error.text
    raise InvalidRequest(text, field=".".join(part for part in (field, path) if part))


@cache
def _reader(message_type: Any, record_type: type[Struct]) -> Step:
    plan = [
        (name, field.has_presence, field.enum_type is not None and not field.is_repeated, _read_step(field, hint))
        for name, hint, field in _fields(message_type, record_type)
    ]

    def read(message: Any) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for name, presence, enum, step in plan:
            if presence and not message.HasField(name):
                continue
            value = getattr(message, name)
            if value or not enum:
                out[name] = _converted(step, value, name) if step else value
        return out

    return read


def _read_step(field: Any, hint: Any) -> Step | None:
    one: Step | None = None
    if _is_map(field):
        floats = field.message_type.fields_by_name["value"].cpp_type in _FLOATS
        return _finite_values if floats else dict
    if field.message_type is not None:
        one = _reader(_class_of(field), _struct_in(hint))
    elif field.cpp_type in _FLOATS:
        one = _finite
    elif get_origin(hint) is dict:
        one = _from_json
    if field.is_repeated:
        return _each(one) if one else list
    return one


@cache
def _writer(message_type: Any, record_type: type[Struct]) -> Step:
    plan = [(name, _write_step(field, hint)) for name, hint, field in _fields(message_type, record_type)]

    def write(record: Any) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for name, step in plan:
            if (value := getattr(record, name)) is not None:
                out[name] = _converted(step, value, name) if step else value
        return out

    return write


def _write_step(field: Any, hint: Any) -> Step | None:
    if _is_map(field):
        return None
    if field.message_type is not None:
        one = _writer(_class_of(field), _struct_in(hint))
        return _each(one) if field.is_repeated else one
    return _to_json if get_origin(hint) is dict else None


def _fields(message_type: Any, record_type: type[Struct]) -> Iterable[tuple[str, Any, Any]]:
    # Any: the stubs describe descriptors by two unrelated types.
    known = message_type.DESCRIPTOR.fields_by_name
    hints = get_type_hints(record_type)
    return [(name, hints[name], known[name]) for name in record_type.__struct_fields__ if name in known]


def _class_of(field: Any) -> Any:
    return GetMessageClass(field.message_type)


def _is_map(field: Any) -> bool:
    return bool(field.message_type and field.message_type.GetOptions().map_entry)


def _struct_in(hint: Any) -> type[Struct]:
    """The record type in `X`, `X | None` or `tuple[X, ...]`."""
    return next(kind for kind in (hint, *get_args(hint)) if isinstance(kind, type) and issubclass(kind, Struct))


def _each(step: Step) -> Step:
    return lambda values: [_converted(step, value, index) for index, value in enumerate(values)]


def _converted(step: Step, value: Any, place: str | int) -> Any:
    try:
        return step(value)
    except _Refused as error:
        raise error.under(place if isinstance(place, str) else f"[{place}]") from None


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise _Refused("must be finite")
    return value


def _finite_values(values: Any) -> dict[str, float]:
    return {key: _converted(_finite, value, key) for key, value in values.items()}


def _from_json(text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _Refused(f"must be a JSON object ({error})") from None


def _to_json(value: dict[str, Any]) -> str:
    try:
        return msgspec.json.encode(value).decode() if value else ""
    except (msgspec.MsgspecError, TypeError) as error:
        raise _Refused(f"cannot be written as JSON ({error})") from None


def _unfit(record: Struct, message_type: Any) -> str:
    """The path of the first field whose value does not fit. Slow, so used for refusals only."""
    for name, value in _writer(message_type, type(record))(record).items():
        try:
            message_type(**{name: value})
        except (ValueError, TypeError):
            inner = getattr(record, name)
            if not isinstance(inner, Struct):
                return str(name)
            below = _unfit(inner, _class_of(message_type.DESCRIPTOR.fields_by_name[name]))
            return f"{name}.{below}".rstrip(".")
    return ""
