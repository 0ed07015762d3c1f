"""What a lease sends again when the store came back: all that may be forgotten, in order, and no more."""

from collections.abc import Awaitable, Callable
from typing import Any

from ebbtide.client.held_lease import JournalEntry, LeaseJournal
from ebbtide.types.rollout import MAX_UNSETTLED, SubmitOrder


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


async def test_what_is_owed_stays_owed_however_often_the_lease_is_renewed_and_is_unconfirmed_again_once_sent() -> None:
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


def submitted(journal: LeaseJournal, now: float, step: int | None = None, first_step: int = 0) -> tuple[int, int, int]:
    """Number, first number that is not settled, and first step of a submit that is acknowledged at once."""
    order = journal.order(step=step, first_step=first_step)
    journal.add(call("submit"), 100, now, order.sequence)
    return order.sequence, order.settled, order.first_step


async def test_a_submit_is_settled_once_it_is_refused_or_durable() -> None:
    journal = filled("")
    assert submitted(journal, 1.0) == (1, 1, 0)
    under_way = journal.order(step=None, first_step=0)
    assert submitted(journal, 2.0) == (3, 1, 0)
    journal.renewed("A", 2.0, 3.5)  # the first is durable
    assert submitted(journal, 4.0) == (4, 2, 0)
    journal.settle(under_way.sequence)
    assert submitted(journal, 5.0) == (5, 3, 0)
    journal.renewed("B", 2.0, 6.0)  # the third to fifth may be forgotten
    assert submitted(journal, 9.0) == (6, 3, 0)
    assert await all_owed(journal, 9.0) == ["submit"] * 3
    journal.renewed("B", 2.0, 12.0)
    assert submitted(journal, 13.0) == (7, 7, 0)


def test_no_step_is_over_while_the_store_may_forget_a_submit_of_it() -> None:
    journal = filled("")
    submitted(journal, 1.0, step=4)
    assert submitted(journal, 2.0, step=6, first_step=6) == (2, 1, 4)
    journal.renewed("A", 2.0, 3.5)
    assert submitted(journal, 4.0, step=7, first_step=7) == (3, 2, 6)
    journal.renewed("A", 2.0, 9.0)
    assert submitted(journal, 9.0, step=8, first_step=8) == (4, 4, 8)


def test_submits_have_no_number_while_too_many_are_not_settled() -> None:
    journal = filled("")
    orders = [journal.order(step=None, first_step=0) for _ in range(MAX_UNSETTLED + 1)]
    assert [order.sequence for order in orders[-2:]] == [MAX_UNSETTLED, 0]
    journal.settle(1)
    assert journal.order(step=None, first_step=0) == SubmitOrder(sequence=MAX_UNSETTLED + 1, settled=2)
