"""Converts the lists of large requests a few records at a time, so that other calls have their turn."""

from collections.abc import Sequence
from typing import TypeVar

from google.protobuf.message import Message
from msgspec import Struct

from ebbtide.coordinator.list_pace import paced
from ebbtide.wire.record_conversion import from_proto

R = TypeVar("R", bound=Struct)


async def records_from_proto(messages: Sequence[Message], kind: type[R], *, field: str) -> list[R]:
    """As `from_proto` for each message; an error names `field` and the index. Raises `InvalidRequest`."""
    found: list[R] = []
    async for page in paced(messages):
        for message in page:
            found.append(from_proto(message, kind, field=f"{field}[{len(found)}]"))
    return found
