"""Keeps the calls of a lease that were acknowledged but are not yet durable in the store.

Invariant: entries stand in the order of their acknowledgement, which is also a valid order to repeat them, and no entry
before `_from` is owed; an entry leaves only when it is known to be durable. Calls wait while the journal is full. When
the process dies the journal is lost, and with it the calls that the store forgets at the same time.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from msgspec import Struct

#: About what a driver sends in some seconds at the coordinator's highest rate.
_LIMIT_BYTES: Final = 64 << 20
#: Bytes that an entry takes besides its request.
_OVERHEAD: Final = 512


class JournalEntry(Struct, eq=False):
    """A call that can be repeated."""

    call: Callable[[], Awaitable[Any]]
    size: int  # bytes
    at: float  # last acknowledged, monotonic seconds
    owed: bool = False  # the store forgot it: repeat it


class LeaseJournal:
    """Pure except for its events: the caller passes the time."""

    def __init__(self, *, limit_bytes: int = _LIMIT_BYTES) -> None:
        self._limit = limit_bytes
        self._entries: list[JournalEntry] = []
        self._size = 0
        self._from = 0  # where the search for owed entries starts
        self._incarnation = ""  # of the store
        self._durable_after_s = 0.0
        #: Set while the journal takes more, and while it is empty.
        self.room, self.idle = asyncio.Event(), asyncio.Event()
        self.room.set()
        self.idle.set()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def needed(self) -> bool:
        """Tell whether the store can forget acknowledged calls."""
        return self._durable_after_s > 0

    def add(self, call: Callable[[], Awaitable[Any]], size: int, now: float) -> None:
        """Record a call that was just acknowledged."""
        if self.needed:
            self._entries.append(JournalEntry(call, size + _OVERHEAD, now))
            self._size += size + _OVERHEAD
            self._update_events()

    def renewed(self, incarnation: str, durable_after_s: float, asked: float) -> None:
        """Note a renewal that was requested at `asked` and answered by this incarnation of the store. All entries are
        owed if it is a new one; otherwise those that are durable by now leave, by the longer of the last two times.
        """
        if incarnation != self._incarnation and self._incarnation:
            for entry in self._entries:
                entry.owed = True
        else:
            durable = asked - max(self._durable_after_s, durable_after_s)
            self._entries = [entry for entry in self._entries if entry.owed or entry.at > durable]
            self._size = sum(entry.size for entry in self._entries)
        self._from = 0
        self._incarnation, self._durable_after_s = incarnation, durable_after_s
        self._update_events()

    def owed(self) -> JournalEntry | None:
        """Return the first entry to repeat."""
        while self._from < len(self._entries):
            if (entry := self._entries[self._from]).owed:
                return entry
            self._from += 1
        return None

    def sent(self, entry: JournalEntry, now: float) -> None:
        """Note that an entry was acknowledged again, or finally refused."""
        entry.owed, entry.at = False, now

    def _update_events(self) -> None:
        for event, on in ((self.room, self._size < self._limit), (self.idle, not self._entries)):
            (event.set if on else event.clear)()
