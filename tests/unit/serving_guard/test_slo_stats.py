"""Served requests are counted and timed."""

import pytest

from ebbtide.serving_guard.borrowers import percentiles
from ebbtide.serving_guard.governor.budget_decider import LearntCosts
from ebbtide.serving_guard.slo_stats import SloStats
from ebbtide.types.grants import UNKNOWN

LEARNT = LearntCosts(ttft_target_s=0.2, tpot_target_s=0.02)


def serve(stats: SloStats, name: str, at: float, *, first: float, gap: float, tokens: int, ok: bool = True) -> float:
    """Serve one request; returns when it ended."""
    stats.arrived(name, "m", 10, at, streamed=True)
    now = at + first
    for number in range(tokens):
        now = at + first + number * gap
        stats.produced(name, 1, now)
    stats.ended(name, LEARNT, now, ok=ok)
    return now


def test_latencies_and_attainment_follow_from_the_tokens() -> None:
    stats = SloStats(0.0)
    serve(stats, "a", 0.0, first=0.1, gap=0.01, tokens=11)
    serve(stats, "b", 1.0, first=0.3, gap=0.03, tokens=11)
    ttft, tpot = stats.latencies(LEARNT)
    assert [ttft.p50, ttft.p99, ttft.attained] == pytest.approx([0.3, 0.3, 0.5])
    assert [tpot.p99, tpot.attained, tpot.target] == pytest.approx([0.03, 0.5, 0.02])
    assert (stats.requests, stats.failed, stats.inside, stats.waiting, stats.tokens_inside) == (2, 0, 0, 0, 0)


def test_models_with_an_slo_of_their_own_are_judged_apart_and_all_others_together() -> None:
    stats = SloStats(0.0, ["m"])
    serve(stats, "a", 0.0, first=0.1, gap=0.01, tokens=11)
    for name, model in (("b", "x"), ("c", "y")):
        stats.arrived(name, model, 10, 1.0, streamed=True)
        stats.produced(name, 1, 1.5)
        stats.ended(name, LEARNT, 1.5, ok=True)
    assert stats.models == ("", "m")
    assert [stats.latencies(LEARNT, model)[0].attained for model in ("m", "", "x")] == [1.0, 0.0, 0.0]
    assert [stats.latencies(LEARNT, model)[0].p99 for model in ("m", "")] == pytest.approx([0.1, 0.5])


def test_a_request_that_fails_before_its_first_token_has_no_latency() -> None:
    stats = SloStats(0.0)
    stats.arrived("a", "m", 10, 0.0, streamed=True)
    assert (stats.waiting, stats.tokens_inside) == (1, 10)
    stats.ended("a", LEARNT, 9.0, ok=False)
    assert (stats.failed, stats.latencies(LEARNT)[0].p99, stats.waiting) == (1, 0.0, 0)


def test_nothing_is_judged_while_the_target_is_still_being_learnt() -> None:
    stats = SloStats(0.0)
    stats.arrived("a", "m", 1, 0.0, streamed=True)
    stats.produced("a", 1, 5.0)
    stats.ended("a", LearntCosts(), 5.0, ok=True)
    assert stats.latencies(LEARNT)[0].attained == UNKNOWN


def test_the_load_is_the_share_of_the_last_minute_with_a_request_inside() -> None:
    stats = SloStats(100.0)
    for begin, end in ((100.25, 103.25), (140.0, 145.5)):
        stats.arrived("a", "m", 1, begin, streamed=True)
        stats.arrived("b", "m", 1, begin + 0.1, streamed=True)
        stats.ended("a", LEARNT, begin + 0.2, ok=True)
        stats.ended("b", LEARNT, end, ok=True)
    assert stats.load(150.0) == pytest.approx(8.5 / 50)
    assert stats.load(161.0) == pytest.approx(7.75 / 60, abs=1 / 60)
    assert stats.load(1000.0) == 0.0


def test_percentiles_are_values_that_occurred() -> None:
    assert percentiles([]) == (0.0, 0.0, 0.0)
    assert percentiles([float(number) for number in range(100)]) == (50.0, 95.0, 99.0)
