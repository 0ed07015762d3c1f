"""The spread of a figure over seeds: extremes of few, and an interval that holds for the median of many."""

from random import Random

import pytest

from ebbtide.simulator.scenario_figures import quantile, spread


def test_few_seeds_show_their_extremes() -> None:
    found = spread([3.0, None, 1.0, 2.0])
    assert found is not None
    assert (found.median, found.low, found.high, found.seeds, found.kind) == (2.0, 1.0, 3.0, 3, "range")
    one = spread([7.0])
    assert one is not None
    assert (one.median, one.low, one.high, one.kind) == (7.0, 7.0, 7.0, "range")


def test_a_figure_that_no_seed_has_has_no_spread() -> None:
    assert spread([]) is None
    assert spread([None, None]) is None


@pytest.mark.parametrize("seeds", [6, 9, 20, 51])
def test_the_interval_covers_the_median_of_a_skewed_distribution_in_95_percent_of_cases(seeds: int) -> None:
    random = Random(f"spread {seeds}")
    covered = 0
    for _ in range(2000):
        found = spread([random.lognormvariate(0, 1) for _ in range(seeds)])
        assert found is not None
        assert found.kind == "interval95"
        covered += found.low <= 1.0 <= found.high  # the median of this distribution
    assert 0.94 <= covered / 2000 <= 0.99  # order statistics cover a little more than they have to


def test_more_seeds_leave_out_more_of_the_extremes() -> None:
    found = spread(float(value) for value in range(1, 10))
    assert found is not None
    assert (found.low, found.median, found.high) == (2.0, 5.0, 8.0)
    five = spread(float(value) for value in range(1, 6))
    assert five is not None
    assert (five.low, five.high, five.kind) == (1.0, 5.0, "range")


def test_quantiles_lie_between_values() -> None:
    assert quantile([], 0.5) is None
    assert quantile([4.0, 1.0], 0.5) == 2.5
    assert quantile([1.0, 2.0, 3.0, 4.0, 5.0], 0.9) == pytest.approx(4.6)
    assert quantile([5.0], 0.9) == 5.0
