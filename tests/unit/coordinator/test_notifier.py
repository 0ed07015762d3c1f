"""Watchers of pages: what they read, and when they read again."""

import asyncio
from collections.abc import AsyncIterator
from typing import NamedTuple

import pytest

from ebbtide.coordinator.state import notifier
from ebbtide.coordinator.state.notifier import Notifier, follow


class Entry(NamedTuple):
    cursor: str


class Pages:
    """A log that is read in pages of `most` entries."""

    def __init__(self, most: int = 64) -> None:
        self.notifier, self.entries, self.most = Notifier(), list[Entry](), most
        self.reads = 0
        self.ended = False

    def write(self, *cursors: str) -> None:
        self.entries += [Entry(cursor) for cursor in cursors]
        self.notifier.notify("log")

    async def read(self, cursor: str) -> list[Entry]:
        self.reads += 1
        first = next((i + 1 for i, one in enumerate(self.entries) if one.cursor == cursor), 0)
        return self.entries[first : first + self.most]

    def watch(self) -> AsyncIterator[Entry]:
        return follow(self.notifier, ("log",), self.read, "", lambda: self.ended)


async def test_a_watcher_gets_all_entries_in_their_order_and_ends_with_the_log() -> None:
    log = Pages(most=2)
    log.write("a", "b", "c", "d", "e")
    log.ended = True
    assert [one.cursor async for one in log.watch()] == ["a", "b", "c", "d", "e"]


async def test_a_watcher_of_a_short_page_sleeps_before_it_reads_again(monkeypatch: pytest.MonkeyPatch) -> None:
    log, slept = Pages(), list[float | None]()

    async def sleep(_notified: asyncio.Event, longest_s: float | None = None) -> bool:
        slept.append(longest_s)
        log.write("b")
        return True

    monkeypatch.setattr(notifier, "notified_or_late", sleep)
    log.write("a")
    watched = log.watch()
    assert [(await anext(watched)).cursor, (await anext(watched)).cursor] == ["a", "b"]
    assert (slept, log.reads) == ([notifier._NEXT_PAGE_S], 2)


async def test_a_page_that_was_cut_is_followed_by_the_next_one_without_a_notification() -> None:
    log = Pages(most=1)
    log.write("a", "b")
    watched = log.watch()
    assert [(await anext(watched)).cursor, (await anext(watched)).cursor] == ["a", "b"]
