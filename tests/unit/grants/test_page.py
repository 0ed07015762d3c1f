"""The page of grants keeps its promises to guard, worker and engine."""

import math
import os
import time
from pathlib import Path

import pytest

from ebbtide.errors import InvalidRequest
from ebbtide.grants import _BELL, _LAYOUT, _VERSION, Page
from ebbtide.types.grants import Budget
from tests.support.waiting import wait_until

NONE = Budget()


def ahead(seconds: float = 60.0) -> float:
    return time.monotonic() + seconds


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "w1.page"


@pytest.fixture
def page(path: Path) -> Page:
    """With a lease."""
    made = Page(path, create=True)
    made.renew(ahead())
    return made


def test_a_step_needs_a_budget_and_a_lease(path: Path) -> None:
    page = Page(path, create=True)
    assert page.begin_step() == NONE
    page.write_budget(Budget(16, 4, ahead()))
    assert page.begin_step() == NONE, "there is no lease"
    page.renew(ahead())
    assert (page.begin_step().tokens, page.begin_step().sequences) == (16, 4)
    page.renew(0.0)
    assert page.begin_step() == NONE, "the lease was given back"


@pytest.mark.parametrize("part", ["budget", "lease"])
async def test_budget_and_lease_run_out_by_themselves(page: Page, part: str) -> None:
    page.write_budget(Budget(16, 4, ahead(0.02 if part == "budget" else 60)))
    page.renew(ahead(0.02 if part == "lease" else 60))
    assert page.budget().tokens == 16
    await wait_until(lambda: page.budget() == NONE, 1.0)
    assert page.begin_step() == NONE


def test_a_budget_ends_with_whichever_of_the_two_ends_first(page: Page) -> None:
    until = ahead(1)
    page.renew(until)
    page.write_budget(Budget(16, 4, ahead(2)))
    assert page.budget().until == pytest.approx(until, abs=1e-6)


@pytest.mark.parametrize("budget", [Budget(0, 4, 1e9), Budget(16, 0, 1e9), Budget(-1, 4, 1e9), Budget(16, -1, 1e9)])
def test_a_budget_without_tokens_or_requests_is_none(page: Page, budget: Budget) -> None:
    page.write_budget(budget)
    assert page.budget() == NONE


@pytest.mark.parametrize("until", [math.inf, 1e30, 1e9])
def test_times_beyond_all_bounds_are_far_ahead(page: Page, until: float) -> None:
    page.write_budget(Budget(16, 4, until))
    page.renew(until)
    assert page.budget().tokens == 16


@pytest.mark.parametrize("until", [math.nan, -math.inf, -1e30, 0.0])
def test_times_that_are_none_or_long_ago_give_nothing(page: Page, until: float) -> None:
    page.write_budget(Budget(16, 4, until))
    assert page.budget() == NONE


def test_a_budget_that_its_writer_left_half_written_is_none_until_the_next_one(page: Page) -> None:
    page.write_budget(Budget(16, 4, ahead()))
    page._words[_VERSION] += 1  # as a writer leaves it that is killed in the middle
    assert page.budget() == NONE
    assert page.begin_step() == NONE
    page.write_budget(Budget(8, 2, ahead()))
    assert page.budget().tokens == 8


def test_the_engine_is_idle_only_as_long_as_a_budget_that_says_so_holds(page: Page) -> None:
    assert not page.idle()
    page.write_budget(Budget(16, 4, ahead()), idle=True)
    assert page.idle()
    page.write_budget(Budget(256, 64, ahead()))
    assert not page.idle(), "a budget beside requests"
    page.write_budget(Budget(16, 4, time.monotonic() - 1), idle=True)
    assert not page.idle()
    page.write_budget(Budget(), idle=True)
    assert not page.idle()


def test_a_step_that_finds_no_budget_was_none(page: Page) -> None:
    page.enter(1, 100)
    page.begin_step()
    assert not page.steps().stepping
    assert page.steps().steps == 0


def test_steps_are_counted_with_their_tokens_and_times(page: Page) -> None:
    page.enter(os.getpid(), 100, 4096)
    page.write_budget(Budget(16, 4, ahead()))
    before = time.monotonic()
    page.begin_step()
    assert page.steps().stepping
    assert before <= page.steps().began <= time.monotonic()
    page.end_step(12)
    page.begin_step()
    page.end_step(0)  # nothing was there to be scheduled
    page.report(running=3, waiting=2, kv_used=7, recomputed=5)
    found = page.steps()
    assert (found.stepping, found.steps, found.scheduled) == (False, 1, 12)
    assert found.began >= before
    assert found.busy_s == pytest.approx(found.ended - before, abs=0.05)
    assert (found.running, found.waiting, found.kv_used, found.recomputed) == (3, 2, 7, 5)
    assert (found.kv_total, found.block_bytes, found.pid) == (100, 4096, os.getpid())


def test_an_engine_that_heeds_nothing_is_seen_to_step(page: Page) -> None:
    assert page.begin_step(heeding=False) == NONE
    assert page.steps().stepping
    page.end_step(1)
    assert not page.steps().stepping


def test_a_new_engine_begins_its_part_anew_and_leaves_the_others(page: Page) -> None:
    page.write_budget(Budget(16, 4, ahead()))
    page.limit_kv(3)
    page.begin_step()
    page.enter(2, 50)
    found = page.steps()
    assert (found.stepping, found.steps, found.pid, found.kv_total) == (False, 0, 2, 50)
    assert page.kv_blocks == -1, "all, until a grant says otherwise"
    assert page.budget().tokens == 16


def test_who_opens_it_again_finds_what_was_written(page: Page, path: Path) -> None:
    page.write_budget(Budget(16, 4, ahead()))
    other = Page(path)
    assert other.budget() == page.budget()
    other.limit_kv(5)
    assert page.kv_blocks == 5


def test_the_offer_is_seen_without_a_lease(page: Page) -> None:
    page.renew(0.0)
    page.write_budget(Budget(16, 4, ahead()))
    assert page.budget() == NONE
    assert page.offered().tokens == 16


def test_waiting_ends_in_time_without_a_budget(page: Page) -> None:
    begun = time.monotonic()
    assert page.await_budget(0.05) == NONE
    assert time.monotonic() - begun >= 0.05


def test_waiting_ends_as_the_memory_that_may_be_used_changes(page: Page) -> None:
    page.limit_kv(7)
    begun = time.monotonic()
    assert page.await_budget(30.0, kv_blocks=-1) == NONE
    assert time.monotonic() - begun < 10


def test_the_bell_continues_after_the_largest_number(page: Page) -> None:
    page._halves[2 * _BELL] = 0xFFFF_FFFF
    page.write_budget(Budget(16, 4, ahead()))
    assert page._halves[2 * _BELL] == 0


def test_a_file_that_is_no_page_is_refused_by_name(path: Path) -> None:
    with pytest.raises(InvalidRequest) as missing:
        Page(path)
    assert missing.value.field == str(path)
    path.write_bytes(b"x" * 100)
    with pytest.raises(InvalidRequest, match="not a page of grants"):
        Page(path, create=True)
    path.write_bytes(b"x" * 4096)
    with pytest.raises(InvalidRequest, match="not a page of grants"):
        Page(path, create=True)
    path.write_bytes(b"")
    with pytest.raises(InvalidRequest, match="not a page of grants"):
        Page(path)


def test_a_page_of_another_layout_is_refused(page: Page, path: Path) -> None:
    page._words[_LAYOUT] += 1 << 48
    with pytest.raises(InvalidRequest, match="another version"):
        Page(path)


@pytest.mark.parametrize("kind", ["symlink", "fifo", "folder"])
def test_what_is_no_plain_file_is_refused(page: Page, path: Path, kind: str) -> None:
    other = path.with_name("other")
    if kind == "symlink":
        other.symlink_to(path)
    elif kind == "fifo":
        os.mkfifo(other)
    else:
        other.mkdir()
    with pytest.raises(InvalidRequest):
        Page(other, create=True)


def test_a_page_that_belongs_to_another_user_is_refused(
    page: Page, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(InvalidRequest, match="of this user"):
        Page(path)


def test_a_page_is_for_its_user_alone(page: Page, path: Path) -> None:
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_page_removes_its_own_file_and_no_successor_s(page: Page, path: Path) -> None:
    path.rename(path.with_name("old"))
    Page(path, create=True)
    page.remove(path)
    assert path.exists()
    page.remove(path.with_name("old"))
    assert not path.with_name("old").exists()
    page.remove(path.with_name("old"))
