"""Costs are predicted by a line through observations and a quantile above it."""

from math import inf
from random import Random

import pytest

from ebbtide.serving_guard.governor.costs import ENOUGH, CostLine, RecentValues


def line(sizes: list[int], noise: float = 0.0, count: int = 200) -> CostLine:
    random, fitted = Random(1), CostLine()
    for number in range(count):
        size = sizes[number % len(sizes)]
        fitted.observe(size, (0.004 + 0.0001 * size) * random.lognormvariate(0.0, noise))
    return fitted


def test_a_line_is_found() -> None:
    fitted = line([16, 64, 256])
    assert fitted.predicted(128) == pytest.approx(0.004 + 0.0128, rel=0.01)
    assert fitted.size_within(0.004 + 0.0128) == pytest.approx(128, rel=0.02)


def test_nineteen_of_twenty_are_no_more_than_predicted() -> None:
    fitted, random = line([16, 64, 256], noise=0.3, count=400), Random(2)
    over = sum((0.004 + 0.0064) * random.lognormvariate(0.0, 0.3) > fitted.predicted(64) for _ in range(2000))
    assert 0.02 < over / 2000 < 0.10


def test_of_one_size_alone_larger_ones_cost_in_proportion_and_smaller_ones_as_much() -> None:
    fitted = line([32])
    assert fitted.typical(64) == pytest.approx(2 * fitted.typical(32))
    assert fitted.typical(4) == pytest.approx(fitted.typical(32))


def test_nothing_known_is_endless_and_little_known_is_taken_twice() -> None:
    fitted = CostLine()
    assert fitted.predicted(1) == inf
    assert fitted.size_within(100.0) == 0.0
    fitted.observe(10, 1.0)
    assert fitted.predicted(10) == pytest.approx(2.0)
    for _ in range(ENOUGH):
        fitted.observe(10, 1.0)
    assert fitted.predicted(10) == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(20))
def test_predictions_never_fall_with_size_and_sizes_within_keep_to_them(seed: int) -> None:
    random, fitted = Random(seed), CostLine()
    for _ in range(random.randrange(1, 300)):
        fitted.observe(random.choice((1, 8, 32, 500)), random.expovariate(100.0))
    predicted = [fitted.predicted(size) for size in range(0, 1000, 7)]
    assert predicted == sorted(predicted)
    for cost in (0.001, 0.01, 0.1):
        size = fitted.size_within(cost)
        assert size in {0.0, inf} or fitted.predicted(size) <= cost * (1 + 1e-9)


def test_one_hiccup_bends_little_and_a_lasting_change_is_believed() -> None:
    fitted = line([16, 64])
    fitted.observe(64, 10.0)
    assert fitted.typical(64) < 1.1 * (0.004 + 0.0064)
    for _ in range(600):
        fitted.observe(16, 0.1)
        fitted.observe(64, 0.2)
    assert fitted.typical(64) == pytest.approx(0.2, rel=0.1)


@pytest.mark.parametrize("bad", [0.0, -1.0, inf, float("nan")])
def test_what_no_work_costs_teaches_nothing(bad: float) -> None:
    fitted = CostLine()
    fitted.observe(bad, 1.0)
    fitted.observe(1.0, bad)
    assert fitted.count == 0


def test_only_the_last_ones_count() -> None:
    recent = RecentValues(10)
    assert recent.quantile(0.5) == 0.0
    for value in range(100):
        recent.add(float(value))
    assert (len(recent), recent.quantile(0.0), recent.quantile(0.5), recent.quantile(1.0)) == (10, 90.0, 94.0, 99.0)
