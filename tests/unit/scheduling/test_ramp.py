"""The share of rollouts falls after trouble and grows in calm, and none run just after served work."""

from itertools import pairwise
from random import Random

import pytest

from ebbtide.serving_guard.governor.governor import LEAST, Quiet, Ramp


def calm(ramp: Ramp, begin: float, seconds: float, every: float = 0.005) -> list[float]:
    return [ramp.calm(begin + every * number) for number in range(1, 1 + round(seconds / every))]


def test_trouble_halves_what_was_used_and_calm_brings_all_of_it_back_within_a_second() -> None:
    ramp = Ramp()
    assert ramp.level == 1.0
    ramp.cut(1.0, 0.8)
    assert ramp.level == pytest.approx(0.4)
    levels = calm(ramp, 1.0, 0.9)
    assert levels == sorted(levels)
    assert levels[-1] == 1.0
    assert levels[5] == pytest.approx(0.6, abs=0.02)


def test_growth_is_slow_near_where_there_was_trouble() -> None:
    ramp = Ramp()
    calm(ramp, 0.0, 0.1)
    ramp.cut(1.0, 1.0)
    levels = calm(ramp, 1.0, 0.4)
    steps = [after - before for before, after in pairwise(levels) if after > before]
    assert steps[0] == pytest.approx(1 / 8)
    assert steps[-2] == pytest.approx(1 / 128)


def test_trouble_all_at_once_is_one_trouble() -> None:
    ramp = Ramp()
    for number in range(5):
        ramp.cut(1.0 + 0.001 * number, 1.0)
    assert ramp.level == 0.5


def test_it_never_falls_to_nothing() -> None:
    ramp = Ramp()
    for number in range(50):
        ramp.cut(float(number), 1.0)
    assert ramp.level == LEAST


def test_only_what_ran_was_calm() -> None:
    ramp = Ramp()
    ramp.cut(1.0, 1.0)
    assert ramp.calm(100.0) == 0.5
    assert ramp.calm(100.02) > 0.5


def test_a_limit_that_stays_is_approached_without_wide_swings() -> None:
    """A step response: from one moment on, more than 0.6 is trouble."""
    ramp, levels, now = Ramp(), [], 0.0
    for _ in range(2000):
        now += 0.01
        level = ramp.calm(now)
        if level > 0.6:
            ramp.cut(now, level)
        levels.append(level)
    last = levels[1000:]
    assert max(last) <= 0.65
    assert sum(last) / len(last) > 0.4
    cuts = sum(after < before for before, after in pairwise(last))
    assert cuts <= len(last) / 12


def quiet() -> Quiet:
    return Quiet(0.01, 0.002, 0.05)


def test_the_quiet_time_is_as_configured_until_gaps_were_seen() -> None:
    one = quiet()
    assert one.seconds == 0.01
    one.came(float("inf"), 0.008)
    assert one.seconds == 0.01


def test_requests_that_follow_at_once_lengthen_it_and_those_that_do_not_shorten_it() -> None:
    chained, sparse, random = quiet(), quiet(), Random(1)
    for _ in range(100):
        chained.came(random.uniform(0.005, 0.015) if random.random() < 0.8 else 2.0, 0.03)
        sparse.came(random.expovariate(1.0), 0.008)
    assert chained.seconds >= 0.015
    assert sparse.seconds == 0.002


@pytest.mark.parametrize("seed", range(10))
def test_it_stays_between_its_bounds(seed: int) -> None:
    one, random = quiet(), Random(seed)
    for _ in range(200):
        one.came(random.lognormvariate(-4, 3), random.expovariate(50.0))
        assert 0.002 <= one.seconds <= 0.05
