"""Defines the records that the coordinator exchanges with the store, their encoding, and the errors of bad data.

Records are msgpack or JSON by field name. Equal records have equal bytes. Records grow at their end. A field after the
first `ALWAYS` ones is left out while it has its default. So a request that is repeated across an upgrade has the same
bytes, and an older coordinator reads what uses nothing newer.

All this stands apart from the client library, which not all who use it have.
"""

import hashlib
from collections.abc import Sequence
from enum import IntEnum, StrEnum
from functools import cache, lru_cache
from typing import Any, Final, NamedTuple, TypeVar, get_type_hints

import msgspec
from msgspec import NODEFAULT, Struct

from ebbtide.errors import Internal, StoreUnavailable
from ebbtide.types.rollout import RolloutRequest, SubmitOutcome, Trajectory
from ebbtide.types.run import BatchSpec, BorrowSpec, EnvironmentSpec, EvaluationSpec, RunSpec, Sampling, TrainerSpec
from ebbtide.types.weights import PolicyVersion

#: What a call raises for data of one run that the store or this program cannot make sense of.
UNEXPECTED: Final = (Internal, msgspec.MsgspecError)


class WritesRefused(StoreUnavailable):
    """The store answered that it takes no writes for now: nothing was done. Callers of services see its base."""


T = TypeVar("T", bound=Struct)
V = TypeVar("V")
_DIGEST_BYTES: Final = 16  # as submit.lua knows
_msgpack, _json = msgspec.msgpack.Encoder(order="deterministic"), msgspec.json.Encoder(order="deterministic")

_PLAIN: Final = frozenset({str, bytes, int, float, bool})
#: So many of a record's first fields are always written; of other records, none that has its default. A number here
#: stays as it is when a record grows.
ALWAYS: Final[dict[type[Struct], int]] = {
    RunSpec: 12, EnvironmentSpec: 2, Sampling: 13, BatchSpec: 6, TrainerSpec: 17, EvaluationSpec: 2, BorrowSpec: 1,
    RolloutRequest: 10, PolicyVersion: 5, Trajectory: 12,
}  # fmt: skip
#: And these of them are left out while they have a default that older programs cannot read: they take their own.
_NEW_DEFAULTS: Final = {(TrainerSpec, "dtype")}


def pack(record: Struct) -> bytes:
    return _msgpack.encode(_written(record))


def unpack(data: bytes, kind: type[T]) -> T:
    return msgspec.msgpack.decode(data, type=kind)


def json_record(record: Struct) -> bytes:
    """A record as JSON."""
    return _json.encode(_written(record))


def pairs(flat: Sequence[V]) -> list[tuple[V, V]]:
    """The pairs of a flat reply: names and values in turn."""
    return list(zip(flat[::2], flat[1::2], strict=True))


def text_pairs(flat: Sequence[bytes]) -> list[tuple[str, str]]:
    return [(name.decode(), value.decode()) for name, value in pairs(flat)]


def json_object(mapping: dict[str, Any]) -> str:
    return msgspec.json.encode(mapping).decode()


def body_digest(request: RolloutRequest) -> bytes:
    """Identifies a request's body: all but version bounds, priority and who waits, which say when to run it, and the
    client's own digest, which is compared apart.
    """
    body = msgspec.structs.replace(
        request, min_version=0, max_version=0, priority=0, interactive=False, client_digest=b""
    )
    return hashlib.blake2b(pack(body), digest_size=_DIGEST_BYTES).digest()


def _written(value: Any) -> Any:
    """The value without the fields that are left out, in itself and in the records that it holds."""
    if isinstance(value, Struct):
        shape = _shape(type(value))
        fields = [getattr(value, name) for name in value.__struct_fields__]
        left_out = tuple(at for at, default in shape.later if fields[at] == default)
        for at in shape.inner:
            fields[at] = _written(fields[at])
        for at in reversed(left_out):
            del fields[at]
        return _without(type(value), left_out)(*fields)
    return [_written(one) for one in value] if isinstance(value, list | tuple) else value


class _Shape(NamedTuple):
    inner: tuple[int, ...]  # places of fields that may hold records
    later: tuple[tuple[int, Any], ...]  # places of fields that are left out with their default, and that


@cache
def _shape(kind: type[Struct]) -> _Shape:
    hints, fields = get_type_hints(kind), msgspec.structs.fields(kind)
    inner = [at for at, field in enumerate(fields) if hints[field.name] not in _PLAIN]
    always = ALWAYS.get(kind, 0)
    later = [
        (at, _default(field)) for at, field in enumerate(fields) if at >= always or (kind, field.name) in _NEW_DEFAULTS
    ]
    return _Shape(tuple(inner), tuple(later))


@lru_cache(maxsize=1024)
def _without(kind: type[Struct], left_out: tuple[int, ...]) -> type[Struct]:
    """A record with the other fields alone: `UNSET` ones would still count towards the head of its bytes."""
    names = kind.__struct_fields__
    return msgspec.defstruct(kind.__name__, [name for at, name in enumerate(names) if at not in left_out])


def _default(field: msgspec.structs.FieldInfo) -> Any:
    return field.default if field.default_factory is NODEFAULT else field.default_factory()


class RolloutState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"


class AttemptStatus(IntEnum):
    """The store's answer about an attempt that its worker continues."""

    OVER = 0
    RUNS = 1
    UNKNOWN = 2  # the store does not know the rollout


class AdoptedAttempt(Struct, frozen=True):
    status: AttemptStatus
    stored: int


class AccountCharge(Struct, frozen=True):
    """What a submit charges to the account of a client's key. Without an owner: nothing."""

    owner: str = ""
    request_debt: int = 0  # thousandths that are added
    token_debt: int = 0
    tokens_per_minute: int = 0  # that pay off the second debt; 0: the key has no such rate, and no such debt
    held: Sequence[tuple[int, int]] = ()  # of each rollout: tokens of its prompt, and the most that it may come to


class AcceptedRollout(Struct, frozen=True):
    """The store's answer to one submitted rollout."""

    outcome: SubmitOutcome
    place: int = 0  # in the queue, of an accepted one
    state: RolloutState | None = None  # of a known one


class OpenRollout(Struct, frozen=True, kw_only=True):
    """A queued or running rollout, as a starting coordinator reads it."""

    place: int
    request: RolloutRequest  # without its prompt
    prompt_len: int  # tokens
    state: RolloutState
    attempt_id: str
    stored: int  # tokens
    barren: int = 0  # see `RequeuedRollout`
    avoid: frozenset[str] = frozenset()
    step: int = 0  # that it was submitted for, if known


class PlacedRollout(Struct, frozen=True):
    """A rollout that was given to a worker."""

    request: RolloutRequest  # with its prompt
    partial: bytes  # the tokens stored so far
    attempts: int


class LeaseHolder(Struct, frozen=True):
    """The holder of a role's lease."""

    holder: str
    rest_s: float  # until the lease ends, unless it is renewed


class EndedAttempt(Struct, frozen=True):
    """An attempt to end."""

    rollout_id: str
    attempt_id: str
    tokens: int = 0  # at most so many tokens are lost with its worker


class RequeuedRollout(Struct, frozen=True):
    """A rollout that went back into the queue after its attempt ended."""

    stored: int  # tokens
    barren: int  # the number of its latest attempts in a row that stored no token
    evidence: str  # why those attempts ended
    avoid: frozenset[str] = frozenset()  # workers that went silent with it
