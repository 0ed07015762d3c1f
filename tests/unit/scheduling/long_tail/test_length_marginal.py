"""Curves of lengths say what share of responses is longer, also if some were stopped."""

from math import exp
from random import Random
from statistics import NormalDist

import pytest

from ebbtide.scheduling.long_tail.length_marginal import log_normal, product_limit

NORMAL = NormalDist()


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5, 0.9, 0.98])
def test_a_quantile_is_that_of_the_lengths(share: float) -> None:
    draw = Random(1)
    lengths = sorted(draw.lognormvariate(7.0, 1.0) for _ in range(2_000))
    marginal = product_limit(lengths)
    assert marginal is not None
    assert marginal.tokens(NORMAL.inv_cdf(share)) == pytest.approx(lengths[int(share * 2_000)], rel=0.03)


def test_responses_that_were_stopped_count_as_longer_than_what_they_made() -> None:
    draw = Random(2)
    lengths = [draw.lognormvariate(7.0, 1.0) for _ in range(4_000)]
    until = [draw.lognormvariate(7.5, 0.5) for _ in lengths]
    whole = [one for one, limit in zip(lengths, until, strict=True) if one <= limit]
    stopped = [limit for one, limit in zip(lengths, until, strict=True) if one > limit]
    marginal, naive = product_limit(whole, stopped), product_limit(whole)
    assert marginal is not None
    assert naive is not None
    assert marginal.tokens(0.0) == pytest.approx(exp(7.0), rel=0.06)
    assert naive.tokens(0.0) < 0.85 * exp(7.0)


def test_nothing_is_known_if_no_response_ended() -> None:
    assert product_limit([], [500, 600]) is None


def test_a_score_and_its_length_belong_together() -> None:
    marginal = log_normal(1_000.0, 1.2)
    for score in (-3.5, -1.0, 0.0, 0.3, 2.7, 3.9):
        assert marginal.score(marginal.tokens(score)) == pytest.approx(score, abs=1e-6)


def test_a_length_beyond_all_that_were_seen_has_a_score_beyond_theirs() -> None:
    draw = Random(3)
    marginal = product_limit(draw.lognormvariate(7.0, 1.0) for _ in range(500))
    assert marginal is not None
    assert marginal.score(50_000) > marginal.score(25_000) > 2.5
    assert marginal.score(10**12) == 6.0


def test_lengths_that_are_all_equal_make_a_curve_that_still_rises() -> None:
    marginal = product_limit([4_000] * 64)
    assert marginal is not None
    assert marginal.tokens(0.0) == pytest.approx(4_000, rel=0.01)
    assert marginal.score(3_000) < marginal.score(4_000) < marginal.score(5_000)


def test_a_single_length_is_enough_for_a_curve() -> None:
    marginal = product_limit([100])
    assert marginal is not None
    assert marginal.tokens(-1.0) < 100 < marginal.tokens(1.0) + 1e-9
