"""Encodes records for the store as msgpack or JSON by field name, so that later releases can add fields.

A field that is newer than `RELEASED` is left out while it has its default. A request that is repeated after an upgrade
therefore has the same bytes, and a coordinator of the former release reads records that use nothing newer.
"""

import hashlib
from collections.abc import Sequence
from functools import cache
from typing import Any, Final, NamedTuple, TypeVar, get_args, get_type_hints

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
    if not _grown(type(record)):
        return _msgpack.encode(record)
    bare = _bare(record)
    return _ordered_msgpack.encode(_lasting(record)) if bare is None else _msgpack.encode(bare)


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


def _bare(record: Struct) -> Struct | None:
    """The record with the fields of 0.1.0 alone, which is encoded directly. None if a newer field is used."""
    plan = _former(type(record))
    if plan is None or any(getattr(record, name) != default for name, default in plan.later):
        return None
    values = [getattr(record, name) for name in plan.names]
    for place in plan.inner:
        if (bare := _bare(values[place])) is None:
            return None
        values[place] = bare
    return plan.kind(*values)


class _FormerKind(NamedTuple):
    kind: type[Struct]  # with the fields of 0.1.0
    names: tuple[str, ...]  # of these
    inner: tuple[int, ...]  # places of those that are records with newer fields
    later: tuple[tuple[str, Any], ...]  # newer fields, with their defaults


@cache
def _former(kind: type[Struct]) -> _FormerKind | None:
    """What 0.1.0 had of a record; None if a record with newer fields may stand in a list in it, or be absent."""
    hints = get_type_hints(kind)
    names = kind.__struct_fields__[: RELEASED.get(kind, 0)]
    if any(_holds_grown(one) for name in names for one in get_args(hints[name])):
        return None
    inner = [place for place, name in enumerate(names) if _holds_grown(hints[name])]
    made = msgspec.defstruct(kind.__name__, names)
    return _FormerKind(made, names, tuple(inner), tuple(_later(kind).items()))


def _holds_grown(hint: Any) -> bool:
    """Whether a hint is, or has among its arguments, a record with newer fields."""
    if isinstance(hint, type) and issubclass(hint, Struct):
        return _grown(hint)
    return any(map(_holds_grown, get_args(hint)))


@cache
def _grown(kind: type[Struct]) -> bool:
    """Whether a record, or one inside it, has newer fields. Others are encoded directly, which is faster."""
    return bool(_later(kind)) or any(map(_grown, _inner(kind)))


def _inner(kind: type[Struct]) -> list[type[Struct]]:
    """The records inside a record."""
    return [hint for hint in get_type_hints(kind).values() if isinstance(hint, type) and issubclass(hint, Struct)]


def _default(field: msgspec.structs.FieldInfo) -> Any:
    return field.default if field.default_factory is NODEFAULT else field.default_factory()
