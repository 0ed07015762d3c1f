"""What a token of a prompt costs is learnt from reads of several lengths, whatever a read costs besides."""

from random import Random

import pytest

from ebbtide.scheduling.dispatch.turns.prefill_speed import PrefillSpeed

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
    assert speed.tokens_per_s == ASSUMED
    speed.observe(0, 0, 1.0)
    speed.observe(3, 100, 0.0)
    assert speed.tokens_per_s == ASSUMED


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("read_s", [0.0, 0.01, 0.2])
@pytest.mark.parametrize("tokens_per_s", [300.0, 20_000.0])
def test_the_speed_is_learnt_apart_from_what_each_read_costs(tokens_per_s: float, read_s: float, seed: int) -> None:
    found = taught(1.0 / tokens_per_s, read_s=read_s, seed=seed).tokens_per_s
    assert found == pytest.approx(tokens_per_s, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_noise_of_a_third_leaves_the_speed_within_a_quarter(seed: int) -> None:
    assert taught(1e-3, read_s=0.05, noise=1 / 3, seed=seed).tokens_per_s == pytest.approx(1_000.0, rel=0.25)


def test_reads_of_one_length_never_make_a_token_cost_more_than_the_whole_read() -> None:
    speed = PrefillSpeed(ASSUMED)
    for _ in range(100):
        speed.observe(4, 4 * 500, 4 * 0.3)
    assert speed.tokens_per_s >= 500 / 0.3 - 1.0


def test_a_worker_that_becomes_slower_is_learnt_anew() -> None:
    speed, random = taught(1e-4), Random(9)
    for _ in range(300):
        tokens = random.randint(20, 4_000)
        speed.observe(2, tokens, tokens * 1e-3)
    assert speed.tokens_per_s == pytest.approx(1_000.0, rel=0.1)


def test_one_pause_that_nobody_reported_moves_the_speed_little() -> None:
    speed = taught(1e-3)
    speed.observe(1, 500, 60.0)
    assert speed.tokens_per_s == pytest.approx(1_000.0, rel=0.1)


def test_impossible_times_leave_a_speed_within_bounds() -> None:
    for seconds in (1e-12, 1e9):
        speed = PrefillSpeed(ASSUMED)
        for _ in range(100):
            speed.observe(1, 1_000, seconds)
        assert 10.0 <= speed.tokens_per_s <= 1e7
