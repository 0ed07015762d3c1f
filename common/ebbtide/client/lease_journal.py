"""What a lease was acknowledged and the store might still forget.

Invariant: entries stand in the order in which they were acknowledged, which is an order in which they can be sent
again, and none before `_from` is owed; one leaves only when it is known to be durable. A call that would make the
journal larger than `limit_bytes` waits. When the process dies the journal is lost: what the store forgets in that very
moment is lost with it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from msgspec import Struct

#: About what a driver sends in some seconds at the highest rate that the coordinator takes.
_LIMIT_BYTES: Final = 64 << 20
#: What an entry takes besides its request.
_OVERHEAD: Final = 512


class JournalEntry(Struct, eq=False):
    """A call that may be made again, and when it was acknowledged last (seconds, monotonic); `owed`: it is to be."""

    call: Callable[[], Awaitable[Any]]
    size: int
    at: float
    owed: bool = False


class LeaseJournal:
    """Pure but for its events: handed `now`. `room` is set while the journal takes more, `idle` while it is empty."""

    def __init__(self, *, limit_bytes: int = _LIMIT_BYTES) -> None:
        self._limit = limit_bytes
        self._entries: list[JournalEntry] = []
        self._size = 0
        self._from = 0  # so that all can be sent again without a look at all of them for each
        self._life = ""
        self._durable_after_s = 0.0
        self.room, self.idle = asyncio.Event(), asyncio.Event()
        self.room.set()
        self.idle.set()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def needed(self) -> bool:
        """Whether the store may forget what it acknowledged."""
        return self._durable_after_s > 0

    def add(self, call: Callable[[], Awaitable[Any]], size: int, now: float) -> None:
        """`call` was just acknowledged."""
        if self.needed:
            self._entries.append(JournalEntry(call, size + _OVERHEAD, now))
            self._size += size + _OVERHEAD
            self._tell()

    def renewed(self, life: str, durable_after_s: float, asked: float) -> None:
        """The lease was renewed in this life of the store, by a call begun at `asked`. If it is another than before,
        all that was not durable in the former one is owed.
        """
        if life != self._life and self._life:
            for entry in self._entries:
                entry.owed = True
        else:
            durable = asked - self._durable_after_s
            self._entries = [entry for entry in self._entries if entry.owed or entry.at > durable]
            self._size = sum(entry.size for entry in self._entries)
        self._from = 0
        self._life, self._durable_after_s = life, durable_after_s
        self._tell()

    def owed(self) -> JournalEntry | None:
        """The first that is to be sent again."""
        while self._from < len(self._entries):
            if (entry := self._entries[self._from]).owed:
                return entry
            self._from += 1
        return None

    def sent(self, entry: JournalEntry, now: float) -> None:
        """It was acknowledged again, or refused for good."""
        entry.owed, entry.at = False, now

    def _tell(self) -> None:
        self._set(self.room, self._size < self._limit)
        self._set(self.idle, not self._entries)

    def _set(self, event: asyncio.Event, on: bool) -> None:
        (event.set if on else event.clear)()
