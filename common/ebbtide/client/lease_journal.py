"""Keeps the calls of a lease that were acknowledged but are not yet durable in the store, and numbers its submits.

Invariant: entries stand in the order of their acknowledgement, which is also a valid order to repeat them, and no entry
before `_from` is owed; an entry leaves only when it is known to be durable. `_unsettled` has, in ascending order, the
numbers of the submits that are under way or stand in the journal: only these may come to the coordinator and be taken.
Calls wait while the journal is full. When the process dies the journal is lost, and with it the calls that the store
forgets at the same time.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Final

from msgspec import Struct

from ebbtide.types.rollout import MAX_UNSETTLED, SubmitOrder

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
    number: int = 0  # of a submit


class LeaseJournal:
    """Pure except for its events: the caller passes the time."""

    def __init__(self, *, limit_bytes: int = _LIMIT_BYTES) -> None:
        self._limit = limit_bytes
        self._entries: list[JournalEntry] = []
        self._size = 0
        self._from = 0  # where the search for owed entries starts
        self._incarnation = ""  # of the store
        self._durable_after_s = 0.0
        self._numbers = 0  # given
        self._unsettled: dict[int, int | None] = {}  # to the submit's step
        self._steps: Counter[int] = Counter()  # submits of each step among them
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

    def order(self, *, step: int | None, first_step: int) -> SubmitOrder:
        """Number a submit that begins. No step counts as over while the store may forget a submit of it. The number is
        0 while too many submits are not settled; then the coordinator recognises a repeat by the rollouts' ids alone.
        """
        first_step = min([first_step, *self._steps])
        settled = next(iter(self._unsettled), self._numbers + 1)
        if self._numbers + 1 - settled >= MAX_UNSETTLED:
            return SubmitOrder(step=step, first_step=first_step)
        self._numbers += 1
        self._unsettled[self._numbers] = step
        if step is not None:
            self._steps[step] += 1
        return SubmitOrder(sequence=self._numbers, settled=settled, step=step, first_step=first_step)

    def settle(self, number: int) -> None:
        """Note that a numbered submit was refused, or is not repeated any more."""
        step = self._unsettled.pop(number, None)
        if step is not None:
            self._steps[step] -= 1
            if not self._steps[step]:
                del self._steps[step]

    def add(self, call: Callable[[], Awaitable[Any]], size: int, now: float, number: int = 0) -> None:
        """Record a call that was just acknowledged. `number`: of a submit."""
        if self.needed:
            self._entries.append(JournalEntry(call, size + _OVERHEAD, now, number=number))
            self._size += size + _OVERHEAD
            self._update_events()
        else:
            self.settle(number)

    def renewed(self, incarnation: str, durable_after_s: float, asked: float) -> None:
        """Note a renewal that was requested at `asked` and answered by this incarnation of the store. All entries are
        owed if it is a new one; otherwise those that are durable by now leave, by the longer of the last two times.
        """
        if incarnation != self._incarnation and self._incarnation:
            for entry in self._entries:
                entry.owed = True
        else:
            durable = asked - max(self._durable_after_s, durable_after_s)
            for entry in self._entries:
                if not entry.owed and entry.at <= durable:
                    self.settle(entry.number)
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
