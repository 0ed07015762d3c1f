"""Gathers one page of a list: as many entries as the caller asked for, and no more than fit into a message."""

from typing import Final, Generic, TypeVar

from google.protobuf.message import Message
from msgspec import Struct

from ebbtide.rpc.channel_options import MAX_MESSAGE_BYTES
from ebbtide.wire.record_conversion import to_proto

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
