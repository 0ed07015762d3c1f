"""Records as bytes in the store: msgpack by field name, so that a field may be added later."""

import hashlib
from typing import Any, TypeVar

import msgspec

from ebbtide.types.rollout import RolloutRequest

T = TypeVar("T", bound=msgspec.Struct)
_encoder = msgspec.msgpack.Encoder(order="deterministic")


def pack(record: msgspec.Struct) -> bytes:
    return _encoder.encode(record)


def unpack(data: bytes, kind: type[T]) -> T:
    return msgspec.msgpack.decode(data, type=kind)


def json_object(mapping: dict[str, Any]) -> str:
    return msgspec.json.encode(mapping).decode()


def body_digest(request: RolloutRequest) -> bytes:
    """What makes two requests with one id the same: all but version bounds and priority, which say when, not what."""
    body = msgspec.structs.replace(request, min_version=0, max_version=0, priority=0)
    return hashlib.blake2b(_encoder.encode(body), digest_size=16).digest()
