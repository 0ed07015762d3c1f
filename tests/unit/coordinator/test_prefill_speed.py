"""A worker's speed of reading is tokens by seconds: it follows what is seen, and is always positive and finite."""

from math import inf, isfinite, nan
from random import Random

import pytest

from ebbtide.coordinator.dispatch.speeds import PrefillSpeed

ASSUMED = 5_000.0


def taught(
    token_s: float, *, read_s: float = 0.0, seed: int = 0, beats: int = 60, noise: float = 0.0, least: int = 20
) -> PrefillSpeed:
    """A worker that said in each heartbeat what some reads took."""
    speed, random = PrefillSpeed(ASSUMED), Random(seed)
    for _ in range(beats):
        reads = random.randint(1, 8)
        tokens = sum(random.randint(least, 2_000) for _ in range(reads))
        seconds = reads * read_s + tokens * token_s
        speed.observe(reads, tokens, seconds * (1.0 + noise * random.uniform(-1.0, 1.0)))
    return speed


def test_until_anything_was_read_the_assumed_speed_counts() -> None:
    speed = PrefillSpeed(ASSUMED)
    assert speed.tokens_per_s == pytest.approx(ASSUMED)
    speed.observe(0, 0, 1.0)
    speed.observe(3, 100, 0.0)
    speed.observe(3, -100, 1.0)
    assert speed.tokens_per_s == pytest.approx(ASSUMED)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("tokens_per_s", [300.0, 20_000.0])
def test_a_few_dozen_reads_teach_the_speed(tokens_per_s: float, seed: int) -> None:
    assert taught(1.0 / tokens_per_s, seed=seed).tokens_per_s == pytest.approx(tokens_per_s, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_noise_of_a_third_leaves_the_speed_within_a_fifth(seed: int) -> None:
    assert taught(1e-3, noise=1 / 3, seed=seed).tokens_per_s == pytest.approx(1_000.0, rel=0.2)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("wait_s", [0.01, 0.1, 1.0])
def test_what_a_read_takes_besides_makes_it_slower_by_its_share_and_no_more(wait_s: float, seed: int) -> None:
    found = taught(1e-3, read_s=wait_s, seed=seed).tokens_per_s
    assert found == pytest.approx(1_000.0 / (1.0 + wait_s / 1.01), rel=0.2)  # reads are 1,010 tokens on average


@pytest.mark.parametrize("seed", range(5))
def test_waits_of_any_length_that_come_by_chance_count_as_their_mean(seed: int) -> None:
    speed, random = PrefillSpeed(ASSUMED), Random(seed)
    for _ in range(2_000):
        tokens = max(1, round(1_500 * random.lognormvariate(0.0, 0.5)))
        speed.observe(1, tokens, tokens / 8_000 + random.expovariate(1 / 0.2))
        assert 1_000.0 <= speed.tokens_per_s <= 8_000.0


@pytest.mark.parametrize("tokens", [1, 20, 300, 777, 1_000, 30_000])
def test_thousands_of_reads_of_one_length_leave_it_where_they_put_it(tokens: int) -> None:
    speed, random = PrefillSpeed(ASSUMED), Random(tokens)
    for number in range(10_000):
        reads = random.choice((1, 1, 2, 3, 5))
        speed.observe(reads, reads * tokens, reads * tokens / 8_000 * random.uniform(0.9, 1.1))
        assert 4_000.0 <= speed.tokens_per_s <= 9_000.0, number


def test_reads_that_take_as_long_whatever_they_bring_never_seem_free() -> None:
    speed, random = PrefillSpeed(ASSUMED), Random(1)
    for _ in range(5_000):
        speed.observe(1, random.randint(1, 4_000), 0.5)
    assert 2_000.0 <= speed.tokens_per_s <= 8_000.0


def test_what_was_assumed_stays_beside_little_that_was_seen() -> None:
    """However many reads of a token there were, they say little: the assumption weighs as much as before."""
    speed = PrefillSpeed(ASSUMED)
    for _ in range(100_000):
        speed.observe(1, 1, 1e-2)
    slow = speed.tokens_per_s
    for _ in range(100):
        speed.observe(200, 200, 200e-2)
    assert 100.0 < slow < 500.0
    assert speed.tokens_per_s == pytest.approx(slow, rel=0.5)


def test_a_worker_that_becomes_slower_is_learnt_anew() -> None:
    speed, random = taught(1e-4), Random(9)
    for _ in range(600):
        tokens = random.randint(20, 4_000)
        speed.observe(2, tokens, tokens * 1e-3)
    assert speed.tokens_per_s == pytest.approx(1_000.0, rel=0.1)


def test_one_pause_that_nobody_reported_moves_the_speed_little() -> None:
    speed = taught(1e-3)
    speed.observe(1, 500, 60.0)
    assert speed.tokens_per_s == pytest.approx(1_000.0, rel=0.1)


@pytest.mark.parametrize("assumed", [0.0, 1e-300, ASSUMED, 1e300, inf])
@pytest.mark.parametrize("seconds", [5e-324, 1e-12, 1e9, inf, nan])
@pytest.mark.parametrize("reads", [1, 10_000])
def test_impossible_times_leave_a_speed_within_bounds(assumed: float, seconds: float, reads: int) -> None:
    speed = PrefillSpeed(assumed)
    for _ in range(100):
        speed.observe(reads, reads * 1_000, seconds)
        assert isfinite(speed.tokens_per_s)
        assert 9.9 <= speed.tokens_per_s <= 1.1e7
