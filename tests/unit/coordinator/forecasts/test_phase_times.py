"""Forecasts of phase times: calibrated quantiles, drift that is followed, and what stands in before any is known."""

import random
from math import exp

import pytest

from ebbtide.coordinator.forecasts.phase_times import PhaseTimes


def covered(share: float, *, drift: float, seed: int) -> float:
    """How many phases were within the quantile that was forecast before each."""
    draw, times = random.Random(seed), PhaseTimes(100.0)
    within = []
    for number in range(600):
        seconds = 100.0 * exp(drift * number) * exp(draw.gauss(0.0, 0.2))
        if number >= 30:
            within.append(seconds <= times.quantile(share))
        times.observe(seconds)
    return sum(within) / len(within)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("drift", [0.0, 0.004, -0.004])
def test_quantiles_cover_what_they_say_also_while_times_drift(share: float, drift: float) -> None:
    found = sum(covered(share, drift=drift, seed=seed) for seed in range(5)) / 5
    assert found == pytest.approx(share, abs=0.05)


def test_the_mean_follows_a_third_less_within_twenty_phases() -> None:
    times = PhaseTimes(100.0)
    for _ in range(100):
        times.observe(100.0)
    for _ in range(20):
        times.observe(66.0)
    assert times.forecast().mean == pytest.approx(66.0, rel=0.1)


def test_an_expectation_stands_in_and_is_soon_outweighed() -> None:
    times = PhaseTimes(100.0)
    first = times.forecast()
    assert first.mean == pytest.approx(100.0, rel=0.01)
    for _ in range(20):
        times.observe(150.0)
    later = times.forecast()
    assert later.mean == pytest.approx(150.0, rel=0.1)
    assert later.error < first.error


def test_plans_are_not_made_again_for_changes_that_are_small() -> None:
    times, draw = PhaseTimes(100.0), random.Random(1)
    for _ in range(100):
        times.observe(100.0 * exp(draw.gauss(0.0, 0.02)))
    told = times.forecast()
    times.observe(101.0)
    assert times.forecast() is told


def test_of_nothing_nothing_is_forecast() -> None:
    times = PhaseTimes()
    assert not times.known
    with pytest.raises(ValueError, match="expected_s"):
        times.forecast()
    times.observe(10.0)
    assert times.forecast().mean == pytest.approx(10.0, rel=0.01)
