"""Converts the lists of large requests a few records at a time, so that other calls have their turn."""

import asyncio
from collections.abc import Iterable
from typing import Final, TypeVar

from google.protobuf.message import Message
from msgspec import Struct

from ebbtide.wire.record_conversion import from_proto

R = TypeVar("R", bound=Struct)
#: Records between two turns of others: about a millisecond's work.
_AT_ONCE: Final = 64


async def records_from_proto(messages: Iterable[Message], kind: type[R], *, field: str) -> list[R]:
    """As `from_proto` for each message; an error names `field` and the index. Raises `InvalidRequest`."""
    found: list[R] = []
    for index, message in enumerate(messages):
        if index % _AT_ONCE == _AT_ONCE - 1:
            await asyncio.sleep(0)
        found.append(from_proto(message, kind, field=f"{field}[{index}]"))
    return found
