"""Who has stopped making tokens, and who is only slow."""

import random
from typing import Any

import pytest

from ebbtide.scheduling.progress import CEILING_S, Doing, Progress

_TICK_S = 0.25


def doing(started: int = 1, pending: int = 0, *, excused: bool = False) -> Doing:
    return Doing(session="a", started=started, pending=pending, excused=excused)


def until_stalled(watch: Progress, what: Doing, start: float, limit: float = 200.0) -> float:
    """Seconds of nothing until the worker is found."""
    now = start
    while not watch.stalled([what], now):
        now += _TICK_S
        assert now < start + limit
    return now - start


def busy(
    watch: Progress, seed: int, *, flush_s: float, jitter_s: float, until: float, judge_late: float = 0.0
) -> float:
    """Tokens arrive every `flush_s`, each message late by up to `jitter_s`; nobody is found. Returns the end of it."""
    draw = random.Random(seed)
    arrivals = sorted(n * flush_s + draw.uniform(0.0, jitter_s) for n in range(1, int(until / flush_s)))
    now, last = 0.0, 0.0
    while arrivals:
        while arrivals and arrivals[0] <= now:
            last = arrivals.pop(0)
            watch.arrived("a", last)
        assert watch.stalled([doing(8)], now) == []
        now += _TICK_S + draw.uniform(0.0, judge_late)
    return max(last, now)


@pytest.mark.parametrize("seed", range(20))
def test_an_engine_that_stops_is_found_within_three_seconds_and_none_that_goes_on(seed: Any) -> None:
    watch = Progress()
    last = busy(watch, seed, flush_s=0.25, jitter_s=0.5, until=600.0, judge_late=0.3)
    assert until_stalled(watch, doing(8), last) <= 3.0


def test_a_loaded_worker_is_waited_for_longer_and_a_rested_one_no_more() -> None:
    watch = Progress()
    last = busy(watch, 1, flush_s=1.9, jitter_s=0.05, until=60.0)
    assert 3.5 <= until_stalled(watch, doing(8), last) <= 4.5
    watch.forget("a")
    assert watch.quiet_s("a", last) == 0.0


def test_held_installing_and_idle_workers_are_not_waited_for() -> None:
    watch = Progress()
    busy(watch, 1, flush_s=0.25, jitter_s=0.0, until=10.0)
    now = 10.0
    for what in [doing(8, excused=True)] * 100 + [doing(0)] * 100:
        now += _TICK_S
        assert watch.stalled([what], now) == []
        assert watch.quiet_s("a", now) == 0.0
    assert 2.0 <= until_stalled(watch, doing(8), now + _TICK_S) <= 3.0  # from when it had work again


def test_a_first_token_has_the_time_that_first_tokens_take() -> None:
    watch = Progress()
    assert until_stalled(watch, doing(0, 4), 0.0) >= CEILING_S  # none was ever seen
    watch = Progress()
    watch.stalled([doing(0, 4)], 0.0)
    watch.stalled([doing(0, 4)], _TICK_S)
    for tick in range(2, 13):
        watch.stalled([doing(0, 4)], tick * _TICK_S)
    watch.arrived("a", 3.0)  # after three seconds
    assert 5.5 <= until_stalled(watch, doing(0, 4), 3.0) <= 6.5


def test_the_judges_own_sleep_is_no_stall() -> None:
    watch = Progress()
    last = busy(watch, 3, flush_s=0.25, jitter_s=0.1, until=20.0)
    assert watch.stalled([doing(8)], last + 30.0) == []
    assert until_stalled(watch, doing(8), last + 30.0 + _TICK_S) >= 1.0


def test_workers_are_found_together() -> None:
    watch = Progress()
    both = [Doing(session=name, started=2, pending=0) for name in "ab"]
    found: list[str] = []
    for tick in range(40):
        if tick < 8:
            watch.arrived("a", tick * _TICK_S)
            watch.arrived("b", tick * _TICK_S)
        found = watch.stalled(both, tick * _TICK_S)
        if found:
            break
    assert found == ["a", "b"]
