"""Reads a request's body as JSON, within bounds on bytes, time and depth."""

import asyncio
import re
from typing import Any, Final

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive

from ebbtide.errors import InvalidRequest, Unavailable
from ebbtide.gateway.access import RequestLimits, RequestSlot
from ebbtide.gateway.dialects.dialect import BodyTooLarge

_decoder: Final = msgspec.json.Decoder()
_CONTAINERS: Final = frozenset({dict, list})
#: Bytes of a body that is decoded in a thread.
_LARGE: Final = 64 << 10
#: Also one that does not end, so that no byte is looked at twice.
_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)


async def read_body(headers: Headers, receive: Receive, limits: RequestLimits, slot: RequestSlot) -> dict[str, Any]:
    """The body's object.

    Raises `BodyTooLarge`, `InvalidRequest` naming `body`, `NoCapacity` while other bodies fill the memory for them, and
    `Unavailable` if the client leaves.
    """
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length) > limits.body_bytes:
        raise _too_large(limits)
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise InvalidRequest("is compressed; send it as it is", field="body")
    try:
        async with asyncio.timeout(limits.body_s):
            data = await _read(receive, limits, slot)
    except TimeoutError:
        raise InvalidRequest(f"did not arrive within {limits.body_s:g} s", field="body") from None
    # A long list of numbers takes a while to walk.
    return await asyncio.to_thread(_decoded, data, limits) if len(data) > _LARGE else _decoded(data, limits)


async def _read(receive: Receive, limits: RequestLimits, slot: RequestSlot) -> bytes:
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Unavailable("the client left before its request had arrived")
        part = message.get("body", b"")
        size += len(part)
        if size > limits.body_bytes:
            raise _too_large(limits)
        slot.add_body(len(part))
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _decoded(data: bytes, limits: RequestLimits) -> dict[str, Any]:
    if _has_more(data, limits.json_containers):
        raise InvalidRequest(f"has more than {limits.json_containers} objects and lists", field="body")
    try:
        body = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"is no JSON: {error}", field="body") from None
    except RecursionError:
        raise _too_deep(limits) from None
    if not isinstance(body, dict):
        raise InvalidRequest("must be a JSON object", field="body")
    _check_depth(body, limits)
    return body


def _has_more(data: bytes, most: int) -> bool:
    """Whether a body has more than `most` objects and lists: as text three bytes each, decoded some eighty."""
    if data.count(b"[") + data.count(b"{") <= most:
        return False
    bare = _STRING.sub(b"", data)
    return bare.count(b"[") + bare.count(b"{") > most


def _check_depth(body: dict[str, Any], limits: RequestLimits) -> None:
    """Whatever reads the body later recurses into it at most so deeply."""
    level: list[Any] = [body]
    for _ in range(limits.json_depth):
        level = [
            child
            for node in level
            for child in (node.values() if type(node) is dict else node)
            if type(child) in _CONTAINERS
        ]
        if not level:
            return
    raise _too_deep(limits)


def _too_large(limits: RequestLimits) -> BodyTooLarge:
    return BodyTooLarge(f"has more than {limits.body_bytes} bytes, the most that this gateway takes", field="body")


def _too_deep(limits: RequestLimits) -> InvalidRequest:
    return InvalidRequest(f"nests deeper than {limits.json_depth} objects and lists", field="body")
