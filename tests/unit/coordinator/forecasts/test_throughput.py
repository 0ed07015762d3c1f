"""What is learnt of a worker's speed."""

import random
from math import isfinite
from typing import Any

import pytest

from ebbtide.coordinator.forecasts.throughput import WorkerThroughput


def true_rate(running: float, context: float, *, plateau: float, slope: float) -> float:
    return 30.0 * min(1.0, plateau / (running * (1.0 + slope * context)))


def learnt(seed: int, *, plateau: float, slope: float = 0.0, noise: float = 0.05, most: int = 64) -> WorkerThroughput:
    """What is learnt in ten minutes of spans of a second, with contexts between 500 and 8,000 tokens."""
    draw, speed = random.Random(seed), WorkerThroughput()
    for _ in range(600):
        running, context = draw.randint(1, most), draw.uniform(500, 8_000)
        rate = true_rate(running, context, plateau=plateau, slope=slope) * draw.uniform(1 - noise, 1 + noise)
        speed.observe(running, context, round(rate * running), 1.0)
    return speed


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("plateau", [12.0, 24.0, 40.0])
def test_rates_and_the_plateau_are_learnt_of_noisy_spans(seed: Any, plateau: Any) -> None:
    speed = learnt(seed, plateau=plateau)
    for running in (1, 8, 16, 32, 64):
        assert speed.rate(running, 2_000) == pytest.approx(true_rate(running, 0, plateau=plateau, slope=0), rel=0.15)
    assert speed.plateau(2_000) == pytest.approx(plateau, rel=0.3)


@pytest.mark.parametrize("seed", range(10))
def test_longer_contexts_slow_a_worker_down_and_bring_its_plateau_forward(seed: Any) -> None:
    speed = learnt(seed, plateau=60.0, slope=1 / 6_000)
    for context in (1_000, 4_000, 8_000):
        expected = true_rate(60, context, plateau=60.0, slope=1 / 6_000)
        assert speed.rate(60, context) == pytest.approx(expected, rel=0.3)
    assert speed.rate(60, 1_000) > 1.15 * speed.rate(60, 8_000)


def test_nothing_is_promised_that_was_not_seen() -> None:
    speed = WorkerThroughput()
    assert speed.rate(4, 100) == 0.0
    assert speed.plateau(100) == 0
    for _ in range(5):
        speed.observe(8, 100, 240, 1.0)
    assert speed.rate(8, 100) == pytest.approx(30.0)
    assert speed.rate(16, 100) == pytest.approx(15.0)  # they share what eight made
    assert speed.rate(1, 100) == pytest.approx(30.0)  # alone it is no slower
    assert speed.plateau(100) == 0  # throughput may grow yet


@pytest.mark.parametrize("seed", range(20))
def test_more_rollouts_never_make_the_interpolated_rate_absurd(seed: Any) -> None:
    speed = learnt(seed, plateau=20.0, noise=0.2)
    assert all(5.0 < speed.rate(running, 2_000) < 40.0 for running in range(1, 65))


def test_a_worker_that_became_slower_is_seen_to_be() -> None:
    speed = WorkerThroughput()
    for _ in range(300):
        speed.observe(16, 1_000, 16 * 30, 1.0)
    for _ in range(300):
        speed.observe(16, 1_000, 16 * 10, 1.0)
    assert speed.rate(16, 1_000) == pytest.approx(10.0, rel=0.1)


def test_spans_without_work_or_time_teach_nothing() -> None:
    speed = WorkerThroughput()
    speed.observe(0, 0, 10, 1.0)
    speed.observe(4, 0, 0, 1.0)
    speed.observe(4, 0, 10, 0.0)
    assert speed.rate(4, 0) == 0.0


@pytest.mark.parametrize("seed", range(50))
def test_no_finite_number_makes_it_fail_or_say_what_is_none(seed: Any) -> None:
    draw, speed = random.Random(seed), WorkerThroughput()
    odd = [0.0, 5e-324, 1e-310, 1e-9, 0.5, 1.0, 8.0, 9.0, 64.0, 1e6, 1e300, 1.7e308, -1.0, -1e308]
    counts = [1, 7, 1 << 53, 1 << 63, 10**400, 0, -5]
    speed.observe(8.0, 100.0, 1 << 63, 1e-310)
    for _ in range(200):
        speed.observe(draw.choice(odd), draw.choice(odd), draw.choice(counts), draw.choice(odd))
        assert isfinite(speed.rate(draw.choice(odd), draw.choice(odd)))
        assert 0 <= speed.plateau(draw.choice(odd)) <= 1e9
