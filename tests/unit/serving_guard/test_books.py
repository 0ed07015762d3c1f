"""Served requests are counted and timed."""

import pytest

from ebbtide.serving_guard.borrowers import percentiles
from ebbtide.serving_guard.governor.budget_decider import LearntCosts
from ebbtide.serving_guard.request_books import RequestBooks
from ebbtide.types.grants import UNKNOWN

LEARNT = LearntCosts(ttft_target_s=0.2, tpot_target_s=0.02)


def serve(
    books: RequestBooks, name: str, at: float, *, first: float, gap: float, tokens: int, ok: bool = True
) -> float:
    """Serve one request; returns when it ended."""
    books.arrived(name, "m", 10, at, streamed=True)
    now = at + first
    for number in range(tokens):
        now = at + first + number * gap
        books.produced(name, 1, now)
    books.ended(name, LEARNT, now, ok=ok)
    return now


def test_latencies_and_attainment_follow_from_the_tokens() -> None:
    books = RequestBooks(0.0)
    serve(books, "a", 0.0, first=0.1, gap=0.01, tokens=11)
    serve(books, "b", 1.0, first=0.3, gap=0.03, tokens=11)
    ttft, tpot = books.latencies(LEARNT)
    assert [ttft.p50, ttft.p99, ttft.attained] == pytest.approx([0.3, 0.3, 0.5])
    assert [tpot.p99, tpot.attained, tpot.target] == pytest.approx([0.03, 0.5, 0.02])
    assert (books.requests, books.failed, books.inside, books.waiting, books.tokens_inside) == (2, 0, 0, 0, 0)


def test_models_with_an_slo_of_their_own_are_judged_apart_and_all_others_together() -> None:
    books = RequestBooks(0.0, ["m"])
    serve(books, "a", 0.0, first=0.1, gap=0.01, tokens=11)
    for name, model in (("b", "x"), ("c", "y")):
        books.arrived(name, model, 10, 1.0, streamed=True)
        books.produced(name, 1, 1.5)
        books.ended(name, LEARNT, 1.5, ok=True)
    assert books.models == ("", "m")
    assert [books.latencies(LEARNT, model)[0].attained for model in ("m", "", "x")] == [1.0, 0.0, 0.0]
    assert [books.latencies(LEARNT, model)[0].p99 for model in ("m", "")] == pytest.approx([0.1, 0.5])


def test_a_request_that_fails_before_its_first_token_has_no_latency() -> None:
    books = RequestBooks(0.0)
    books.arrived("a", "m", 10, 0.0, streamed=True)
    assert (books.waiting, books.tokens_inside) == (1, 10)
    books.ended("a", LEARNT, 9.0, ok=False)
    assert (books.failed, books.latencies(LEARNT)[0].p99, books.waiting) == (1, 0.0, 0)


def test_nothing_is_judged_while_the_target_is_still_being_learnt() -> None:
    books = RequestBooks(0.0)
    books.arrived("a", "m", 1, 0.0, streamed=True)
    books.produced("a", 1, 5.0)
    books.ended("a", LearntCosts(), 5.0, ok=True)
    assert books.latencies(LEARNT)[0].attained == UNKNOWN


def test_the_load_is_the_share_of_the_last_minute_with_a_request_inside() -> None:
    books = RequestBooks(100.0)
    for begin, end in ((100.25, 103.25), (140.0, 145.5)):
        books.arrived("a", "m", 1, begin, streamed=True)
        books.arrived("b", "m", 1, begin + 0.1, streamed=True)
        books.ended("a", LEARNT, begin + 0.2, ok=True)
        books.ended("b", LEARNT, end, ok=True)
    assert books.load(150.0) == pytest.approx(8.5 / 50)
    assert books.load(161.0) == pytest.approx(7.75 / 60, abs=1 / 60)
    assert books.load(1000.0) == 0.0


def test_percentiles_are_values_that_occurred() -> None:
    assert percentiles([]) == (0.0, 0.0, 0.0)
    assert percentiles([float(number) for number in range(100)]) == (50.0, 95.0, 99.0)
