"""Encodes records for the store as msgpack or JSON by field name, so that later releases can add fields.

A field that is newer than `RELEASED` is left out while it has its default. A request that is repeated after an upgrade
therefore has the same bytes, and a coordinator of the former release reads records that use nothing newer.
"""

import hashlib
from collections.abc import Sequence
from functools import cache
from typing import Any, Final, TypeVar, get_type_hints

import msgspec
from msgspec import NODEFAULT, Struct

from ebbtide.types.rollout import RolloutRequest, Trajectory
from ebbtide.types.run import BatchSpec, BorrowSpec, EnvironmentSpec, EvaluationSpec, RunSpec, Sampling, TrainerSpec
from ebbtide.types.weights import PolicyVersion

T = TypeVar("T", bound=Struct)
V = TypeVar("V")
_DIGEST_BYTES: Final = 16  # as submit.lua knows
_msgpack, _json = msgspec.msgpack.Encoder(order="deterministic"), msgspec.json.Encoder(order="deterministic")
_ordered_msgpack, _ordered_json = msgspec.msgpack.Encoder(), msgspec.json.Encoder()

#: Numbers of fields that records had in 0.1.0; later fields follow them. Records that are missing here are newer.
RELEASED: Final[dict[type[Struct], int]] = {
    RunSpec: 12, EnvironmentSpec: 2, Sampling: 13, BatchSpec: 6, TrainerSpec: 17, EvaluationSpec: 2, BorrowSpec: 1,
    RolloutRequest: 10, PolicyVersion: 5, Trajectory: 12,
}  # fmt: skip


def pack(record: Struct) -> bytes:
    kind = type(record)
    if not _grown(kind):
        return _msgpack.encode(record)
    former = _former(kind)
    if former is not None and all(getattr(record, name) == default for name, default in _later(kind).items()):
        return _msgpack.encode(former(*(getattr(record, name) for name in former.__struct_fields__)))
    return _ordered_msgpack.encode(_lasting(record))


def unpack(data: bytes, kind: type[T]) -> T:
    return msgspec.msgpack.decode(data, type=kind)


def json_record(record: Struct) -> bytes:
    """A record as JSON. Equal records have equal bytes."""
    return _ordered_json.encode(_lasting(record)) if _grown(type(record)) else _json.encode(record)


def pairs(flat: Sequence[V]) -> list[tuple[V, V]]:
    """The pairs of a flat reply: names and values in turn."""
    return list(zip(flat[::2], flat[1::2], strict=True))


def text_pairs(flat: Sequence[bytes]) -> list[tuple[str, str]]:
    return [(name.decode(), value.decode()) for name, value in pairs(flat)]


def json_object(mapping: dict[str, Any]) -> str:
    return msgspec.json.encode(mapping).decode()


def body_digest(request: RolloutRequest) -> bytes:
    """Identifies a request's body: all but version bounds, priority and who waits, which say when to run it. The
    client's digest is not in it: it is compared apart, as former gateways give none.
    """
    body = msgspec.structs.replace(
        request, min_version=0, max_version=0, priority=0, interactive=False, client_digest=b""
    )
    return hashlib.blake2b(pack(body), digest_size=_DIGEST_BYTES).digest()


def _lasting(value: Any) -> Any:
    """The part of a value that is written: fields in their order, keys sorted."""
    if isinstance(value, Struct):
        later = _later(type(value))
        written = ((name, getattr(value, name)) for name in value.__struct_fields__)
        return {name: _lasting(one) for name, one in written if name not in later or one != later[name]}
    if isinstance(value, dict):
        return {key: _lasting(value[key]) for key in sorted(value)}
    return [_lasting(one) for one in value] if isinstance(value, list | tuple) else value


@cache
def _later(kind: type[Struct]) -> dict[str, Any]:
    """The defaults of a record's fields that are newer than 0.1.0."""
    return {field.name: _default(field) for field in msgspec.structs.fields(kind)[RELEASED.get(kind, 0) :]}


@cache
def _former(kind: type[Struct]) -> type[Struct] | None:
    """The record with the fields of 0.1.0, which is encoded directly. None if a record inside it has newer fields."""
    if any(map(_grown, _inner(kind))):
        return None
    return msgspec.defstruct(kind.__name__, kind.__struct_fields__[: RELEASED.get(kind, 0)])


@cache
def _grown(kind: type[Struct]) -> bool:
    """Whether a record, or one inside it, has newer fields. Others are encoded directly, which is faster."""
    return bool(_later(kind)) or any(map(_grown, _inner(kind)))


def _inner(kind: type[Struct]) -> list[type[Struct]]:
    """The records inside a record."""
    return [hint for hint in get_type_hints(kind).values() if isinstance(hint, type) and issubclass(hint, Struct)]


def _default(field: msgspec.structs.FieldInfo) -> Any:
    return field.default if field.default_factory is NODEFAULT else field.default_factory()
