"""Wakes those who wait: watchers, who read the store by cursor and sleep until their topic is notified, and the loops
that decide, when the state has changed.

Invariant: a topic exists only while it has listeners. A lost notification loses no data: watchers also poll.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager, suppress
from typing import Final, Protocol, TypeVar

from ebbtide.rpc.fair_limiter import stream_turn

Topic = tuple[str, ...]
#: A watcher's longest sleep after an empty page.
_LOOK_AGAIN_S: Final = 2.0
#: Its sleep after any other page: what comes close together is read at once.
_GATHER_S: Final = 0.02
#: Its longest sleep after that, without a notification: the page may have been cut, and there may be another.
_NEXT_PAGE_S: Final = 0.05
#: After a page of so many records the next one is read at once.
_MANY: Final = 16


class Listener(Protocol):
    """An event, or what acts like one."""

    def set(self) -> None: ...


class Notifier:
    def __init__(self) -> None:
        self._listeners: dict[Topic, set[Listener]] = {}
        self._kinds: Counter[str] = Counter()  # listeners by kind, the topic's first part

    def notify(self, *topic: str) -> None:
        for listener in self._listeners.get(topic, ()):
            listener.set()

    def notify_all(self, kind: str, run_id: str, members: Iterable[str]) -> None:
        """Notify `(kind, run_id, member)` for each member; cheap while the kind has no listener."""
        if self._kinds[kind]:
            for member in members:
                self.notify(kind, run_id, member)

    @contextmanager
    def listening(self, *topic: str) -> Iterator[asyncio.Event]:
        """An event that each notification sets from now on."""
        event = asyncio.Event()
        with self.told(event, *topic):
            yield event

    @contextmanager
    def told(self, listener: Listener, *topic: str) -> Iterator[None]:
        """Have each notification call `listener.set` meanwhile."""
        self._listeners.setdefault(topic, set()).add(listener)
        self._kinds[topic[0]] += 1
        try:
            yield
        finally:
            self._kinds[topic[0]] -= 1
            self._listeners[topic].discard(listener)
            if not self._listeners[topic]:
                del self._listeners[topic]


async def notified_or_late(notified: asyncio.Event, longest_s: float | None = None) -> bool:
    """Sleep until the next notification (true), or until it is time to look again without one."""
    try:
        async with asyncio.timeout(_LOOK_AGAIN_S if longest_s is None else longest_s):
            return await notified.wait()
    except TimeoutError:
        return False


class CursorReader(Protocol):
    @property
    def cursor(self) -> str: ...


C = TypeVar("C", bound=CursorReader)


async def follow(
    notifier: Notifier, topic: Topic, read: Callable[[str], Awaitable[list[C]]], cursor: str, ended: Callable[[], bool]
) -> AsyncIterator[C]:
    """As `follow_pages`, record by record."""
    async with aclosing(follow_pages(notifier, topic, read, cursor, ended)) as pages:
        async for page in pages:
            for record in page:
                yield record


async def follow_pages(
    notifier: Notifier, topic: Topic, read: Callable[[str], Awaitable[list[C]]], cursor: str, ended: Callable[[], bool]
) -> AsyncGenerator[list[C], None]:
    """All records after `cursor`, page by page, then new ones, until `ended` and nothing is left.

    Only one page is in memory at a time: a slow reader delays nobody else.
    """
    with notifier.listening(*topic) as notified:
        while True:
            notified.clear()
            over = ended()
            async with stream_turn():
                page = await read(cursor)
            if page:
                yield page
                cursor = page[-1].cursor
            if over and not page:
                return
            if not page:
                await notified_or_late(notified)
            elif len(page) < _MANY and not over:
                await asyncio.sleep(_GATHER_S)
                if not notified.is_set():
                    await notified_or_late(notified, _NEXT_PAGE_S)


class DispatchWakeups:
    """Wakes the dispatcher's loops when the state has changed.

    Invariant: a change that a decision depends on calls `decide`, and an attempt that loses its worker calls `reap`.
    The state does both; the loops only wait.
    """

    def __init__(self) -> None:
        self._decide, self._reap = asyncio.Event(), asyncio.Event()

    def decide(self) -> None:
        """There may be something to decide."""
        self._decide.set()

    def reap(self) -> None:
        """There may be an attempt to re-queue, or an ended run to delete."""
        self._reap.set()

    async def wait_to_decide(self, longest_s: float, gather_s: float) -> None:
        """Wait for a change, and then for those that come within `gather_s`; at most `longest_s` for the first."""
        with suppress(TimeoutError):
            async with asyncio.timeout(longest_s):  # not wait_for, which may swallow a cancellation
                await self._decide.wait()
            await asyncio.sleep(gather_s)
        self._decide.clear()

    async def wait_to_reap(self, longest_s: float) -> None:
        """Wait for an attempt without a worker, or an ended run; at most `longest_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(longest_s):
                await self._reap.wait()
        self._reap.clear()
