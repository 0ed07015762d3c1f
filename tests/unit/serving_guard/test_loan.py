"""What a guard writes for one borrower, and reads of it."""

import os
import time
from pathlib import Path

import pytest

from ebbtide.grants import Page, page_path
from ebbtide.serving_guard.loan import SILENT_S, Account, Loan
from ebbtide.types.grants import Budget, Hello, Report, Residency


@pytest.fixture
def engine(tmp_path: Path) -> Page:
    page = Page(page_path(tmp_path, "w"), create=True)
    page.enter(os.getpid(), kv_total=8, block_bytes=16)
    page.renew(time.monotonic() + 60)
    return page


@pytest.fixture
def loan(tmp_path: Path, engine: Page) -> Loan:
    hello = Hello(protocol_version=1, worker_id="w", slots=4, step_tokens=32)
    return Loan(hello, (), Page(page_path(tmp_path, "w")), Account(), time.monotonic())


def step(engine: Page, tokens: int = 3) -> None:
    assert engine.begin_step(heeding=False) is not None
    engine.end_step(tokens)


def test_a_budget_is_cut_to_what_the_engine_can_take(loan: Loan, engine: Page) -> None:
    now = time.monotonic()
    loan.write(Budget(100, 100, now + 1), now)
    assert (engine.budget().tokens, engine.budget().sequences) == (32, 4)
    loan.write(Budget(), now)
    assert engine.budget() == Budget()


def test_a_budget_of_no_sequences_is_none(loan: Loan, engine: Page) -> None:
    now = time.monotonic()
    loan.write(Budget(5, 0, now + 1), now)
    assert loan.taken_at is not None
    assert not engine.budget().tokens


def test_a_shorter_budget_is_written_at_once_and_a_slightly_longer_one_is_not(loan: Loan, engine: Page) -> None:
    now = time.monotonic()
    loan.write(Budget(8, 2, now + 1), now)
    loan.write(Budget(8, 2, now + 1.001), now)
    assert engine.budget().until == pytest.approx(now + 1, abs=1e-6)
    loan.write(Budget(8, 2, now + 0.5), now)
    assert engine.budget().until == pytest.approx(now + 0.5, abs=1e-6)


def test_each_step_is_told_once_with_its_tokens(loan: Loan, engine: Page) -> None:
    step(engine, 3)
    step(engine, 5)
    told = list(loan.new_steps())
    assert [tokens for _, tokens, _ in told] == [4, 4]
    assert not list(loan.new_steps())
    assert loan.account.gpu_s > 0


def test_a_reclaim_lasts_from_the_arrival_to_the_end_of_the_step_under_way(loan: Loan, engine: Page) -> None:
    loan.write(Budget(8, 2, time.monotonic() + 1), time.monotonic())
    engine.begin_step()
    arrived = time.monotonic()
    loan.write(Budget(), arrived)
    loan.reclaimed(arrived)
    list(loan.new_steps())
    assert not loan.account.latencies
    engine.end_step(4)
    list(loan.new_steps())
    assert list(loan.account.latencies) == [pytest.approx(engine.steps().ended - arrived)]


def test_an_engine_that_stood_still_was_reclaimed_at_once(loan: Loan, engine: Page) -> None:
    step(engine)
    loan.reclaimed(time.monotonic())
    list(loan.new_steps())
    assert list(loan.account.latencies) == [0.0]


def test_a_silent_worker_and_one_whose_weights_sleep_have_no_budget(loan: Loan) -> None:
    now = time.monotonic()
    assert loan.granted(now)
    assert not loan.granted(now + 1.1 * SILENT_S)
    loan.heard(Report(residency=Residency.HOST, wake_host_s=2.0), now)
    assert not loan.granted(now)
    assert loan.wake_s == 2.0


def test_harvest_counts_from_the_first_report_and_through_a_restart(loan: Loan) -> None:
    for tokens in (1000, 1010, 4):
        loan.heard(Report(tokens_generated=tokens), time.monotonic())
    assert loan.account.tokens == 14
