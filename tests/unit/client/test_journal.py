"""What a lease sends again when the store came back: all that may be forgotten, in order, and no more."""

from collections.abc import Awaitable, Callable
from typing import Any

from ebbtide.client.lease_journal import JournalEntry, LeaseJournal


def call(name: str) -> Callable[[], Awaitable[str]]:
    async def again() -> str:
        return name

    return again


def filled(names: str, *, durable_after_s: float = 2.0) -> LeaseJournal:
    """In life A since 0 s; each call acknowledged a second after the one before, the first at 1 s."""
    journal = LeaseJournal(limit_bytes=10_000)
    journal.renewed("A", durable_after_s, 0.0)
    for number, name in enumerate(names):
        journal.add(call(name), 100, number + 1.0)
    return journal


async def all_owed(journal: LeaseJournal, now: float) -> list[str]:
    found = []
    while entry := journal.owed():
        found.append(await entry.call())
        journal.sent(entry, now)
    return found


async def test_nothing_is_kept_where_an_acknowledgement_is_durable() -> None:
    journal = filled("abc", durable_after_s=0.0)
    assert not journal
    assert journal.idle.is_set()
    assert not journal.needed


async def test_only_what_was_acknowledged_just_before_a_renewal_of_the_same_life_is_kept() -> None:
    journal = filled("abcde")
    journal.renewed("A", 2.0, 5.5)  # what was acknowledged up to 3.5 s is durable
    assert len(journal) == 2
    journal.renewed("B", 2.0, 6.0)
    assert await all_owed(journal, 6.1) == ["d", "e"]


async def test_what_is_owed_stays_owed_however_often_the_lease_is_renewed_and_is_in_doubt_again_once_sent() -> None:
    journal = filled("ab")
    journal.renewed("B", 2.0, 3.0)
    first = journal.owed()
    assert first is not None
    journal.sent(first, 3.1)
    journal.renewed("B", 2.0, 100.0)
    assert await all_owed(journal, 100.1) == ["b"]
    journal.renewed("C", 2.0, 101.0)
    assert await all_owed(journal, 101.1) == ["b"]
    journal.renewed("C", 2.0, 104.0)
    assert journal.idle.is_set()


async def test_a_full_journal_has_no_room_until_something_is_durable() -> None:
    journal = filled("a")
    journal.add(call("large"), 9_500, 1.5)
    assert not journal.room.is_set()
    journal.renewed("A", 2.0, 3.0)
    assert not journal.room.is_set()
    journal.renewed("A", 2.0, 3.6)
    assert journal.room.is_set()
    assert not journal


async def test_what_is_owed_is_found_without_a_look_at_all_that_was_sent_again() -> None:
    class Counted(JournalEntry, eq=False):
        """Counts how often anybody asks whether it is owed."""

        looks: int = 0

        def __getattribute__(self, name: str) -> Any:
            if name == "owed":
                self.looks += 1
            return super().__getattribute__(name)

    journal = filled("")
    entries = [Counted(call("a"), 1, 1.0) for _ in range(500)]
    journal._entries.extend(entries)
    journal.renewed("B", 2.0, 1.5)
    assert len(await all_owed(journal, 1.6)) == 500
    assert max(entry.looks for entry in entries) <= 3
    journal.add(call("b"), 1, 1.7)
    assert journal.owed() is None
    journal.renewed("C", 2.0, 1.8)
    assert (await all_owed(journal, 1.9))[-1] == "b"


async def test_while_an_fsync_of_the_store_lasts_more_is_kept() -> None:
    journal = filled("abcde")
    journal.renewed("A", 4.0, 5.5)  # only what was acknowledged up to 1.5 s is durable
    assert len(journal) == 4
    journal.renewed("A", 2.0, 6.0)
    journal.renewed("B", 2.0, 7.0)
    assert await all_owed(journal, 7.1) == ["c", "d", "e"]
