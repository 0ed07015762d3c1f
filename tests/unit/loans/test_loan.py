"""A loan writes its budget into the page, and measures how long its engine goes on after a reclaim."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebbtide.grants import Page
from ebbtide.serving_guard.borrowers import Loan, LoanAccount
from ebbtide.types.grants import GRANTS_VERSION, Budget, Hello


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    made = Page(tmp_path / "w.page", create=True)
    made.enter(1, 10)
    made.renew(time.monotonic() + 60)
    yield made
    made.close()


def lent(page: Page) -> Loan:
    hello = Hello(protocol_version=GRANTS_VERSION, worker_id="w", slots=8, step_tokens=64)
    return Loan(hello, (), page, LoanAccount(), time.monotonic())


def test_a_budget_that_is_about_to_end_is_written_again_though_its_end_hardly_moves(page: Page) -> None:
    loan, now = lent(page), time.monotonic()
    loan.write(Budget(8, 8, now + 0.005), now)
    loan.write(Budget(8, 8, now + 0.012), now)

    assert page.offered().until == pytest.approx(now + 0.012)


def test_the_same_budget_is_written_again_when_somebody_comes_in(page: Page) -> None:
    loan, now = lent(page), time.monotonic()
    loan.write(Budget(8, 8, now + 10), now, idle=True)
    assert page.idle()
    loan.write(Budget(8, 8, now + 10), now)
    assert page.offered().tokens
    assert not page.idle()


def test_a_step_that_began_between_an_arrival_and_the_take_back_is_waited_for(page: Page) -> None:
    loan, now = lent(page), time.monotonic()
    loan.write(Budget(8, 8, now + 10), now)
    arrived = time.monotonic()
    assert page.begin_step().tokens
    loan.write(Budget(), arrived)
    loan.reclaimed(arrived)
    list(loan.new_steps())
    met = loan.yielding

    page.end_step(8)
    list(loan.new_steps())

    assert met
    assert list(loan.account.latencies) == [pytest.approx(page.steps().ended - arrived)]


def test_a_reclaim_that_meets_no_step_is_counted_and_flatters_no_percentile(page: Page) -> None:
    loan, now = lent(page), time.monotonic()
    loan.write(Budget(8, 8, now + 10), now)
    loan.write(Budget(), now)
    loan.reclaimed(now)

    assert (loan.account.reclaims, list(loan.account.latencies)) == (1, [])
