"""Takes in and gives out large lists in parts, so that other calls have their turn and messages stay within bounds."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Final, Generic, TypeVar

from google.protobuf.message import Message
from msgspec import Struct

from ebbtide.rpc.channel_options import MAX_MESSAGE_BYTES
from ebbtide.wire.record_conversion import from_proto, to_proto

Entry = TypeVar("Entry", bound=Message)
#: Bytes of a page, but for its last entry: an entry of the largest size still fits into the message.
_PAGE_BYTES: Final = MAX_MESSAGE_BYTES // 2


class ListPage(Generic[Entry]):
    """`size`: entries, at most; 0: as many as fit."""

    def __init__(self, kind: type[Entry], size: int) -> None:
        self._kind, self._size, self._bytes = kind, size, 0
        self.messages: list[Entry] = []
        self._last = ""
        self.next = ""  # the next page's cursor; empty if this page has the rest

    def add(self, cursor: str, entry: Struct) -> bool:
        """Add an entry, which `cursor` names; false if the page is full without it."""
        if self._bytes >= _PAGE_BYTES or len(self.messages) == self._size > 0:
            self.next = self._last
            return False
        message = to_proto(entry, self._kind)
        self.messages.append(message)
        self._bytes, self._last = self._bytes + message.ByteSize(), cursor
        return True


R = TypeVar("R", bound=Struct)


async def records_from_proto(messages: Sequence[Message], kind: type[R], *, field: str) -> list[R]:
    """As `from_proto` for each message; an error names `field` and the index. Raises `InvalidRequest`."""
    found: list[R] = []
    async for page in paced(messages):
        for message in page:
            found.append(from_proto(message, kind, field=f"{field}[{len(found)}]"))
    return found


T = TypeVar("T")
#: Entries between two pauses: a few milliseconds' work.
AT_ONCE: Final = 64
#: A pause lasts as long as the work before it, but no longer than this.
_LONGEST_S: Final = 0.05


async def paced(items: Sequence[T]) -> AsyncIterator[Sequence[T]]:
    """The items in pages. Between two pages is a pause as long as the caller's work on the first."""
    for first in range(0, len(items), AT_ONCE):
        began = time.monotonic()
        yield items[first : first + AT_ONCE]
        if first + AT_ONCE < len(items):
            await asyncio.sleep(min(_LONGEST_S, time.monotonic() - began))
