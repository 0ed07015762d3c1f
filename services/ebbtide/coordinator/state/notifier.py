"""Waking those who wait for news in the store: watchers read it by cursor, and sleep until their topic is rung.

Invariant: a topic is here only while somebody listens to it. Nothing is lost if a ring is: watchers look again by
themselves from time to time.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, Protocol, TypeVar

Topic = tuple[str, ...]
#: How long a watcher sleeps at most: when there was nothing, and when what there was need not have been all.
_LOOK_AGAIN_S: Final = 2.0
_SOON_S: Final = 0.01
#: So many records in a page, and there are more behind it.
_MANY: Final = 16


class Notifier:
    def __init__(self) -> None:
        self._listeners: dict[Topic, set[asyncio.Event]] = {}
        self._kinds: Counter[str] = Counter()  # how many listen to topics of each kind, which is what they begin with

    def ring(self, *topic: str) -> None:
        for event in self._listeners.get(topic, ()):
            event.set()

    def ring_all(self, kind: str, run_id: str, members: Iterable[str]) -> None:
        """Ring `(kind, run_id, member)` for each; cheap while nobody listens to any of the kind."""
        if self._kinds[kind]:
            for member in members:
                self.ring(kind, run_id, member)

    @contextmanager
    def listening(self, *topic: str) -> Iterator[asyncio.Event]:
        """An event set by each ring, from now on."""
        event = asyncio.Event()
        self._listeners.setdefault(topic, set()).add(event)
        self._kinds[topic[0]] += 1
        try:
            yield event
        finally:
            self._kinds[topic[0]] -= 1
            self._listeners[topic].discard(event)
            if not self._listeners[topic]:
                del self._listeners[topic]


async def rung_or_late(rung: asyncio.Event, *, soon: bool = False) -> None:
    """Sleep until the next ring, or until it is time to look again without one."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_SOON_S if soon else _LOOK_AGAIN_S):
            await rung.wait()


class CursorReader(Protocol):
    @property
    def cursor(self) -> str: ...


C = TypeVar("C", bound=CursorReader)


async def follow(
    bells: Notifier, topic: Topic, read: Callable[[str], Awaitable[list[C]]], cursor: str, ended: Callable[[], bool]
) -> AsyncIterator[C]:
    """All records after `cursor`, page by page, then new ones, until `ended` and nothing is left.

    One page is in memory at a time, and the next is read when the last was taken: a slow reader holds up itself alone.
    """
    with bells.listening(*topic) as rung:
        while True:
            rung.clear()
            over = ended()
            page = await read(cursor)
            for record in page:
                yield record
                cursor = record.cursor
            if over and not page:
                return
            if len(page) < _MANY:
                await rung_or_late(rung, soon=bool(page))
