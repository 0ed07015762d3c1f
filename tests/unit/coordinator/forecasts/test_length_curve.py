"""What is learnt of a run's lengths, whatever their groups, and how alike the samples of a group are."""

import random
from collections.abc import Sequence
from math import exp, sqrt
from random import Random
from typing import Any

import numpy as np
import pytest

from ebbtide.coordinator.forecasts.length_learner import EndedGroup, LengthLearner, UnfinishedGroup
from tests.unit.coordinator.forecasts.drawn_lengths import known_lengths


@pytest.mark.parametrize("made", [0, 300, 2_000, 8_000])
@pytest.mark.parametrize("seed", range(5))
def test_the_rest_is_the_mean_of_what_longer_ones_still_made(seed: Any, made: Any) -> None:
    draw = random.Random(seed)
    known = [int(draw.lognormvariate(6.8, 1.0)) + 1 for _ in range(8_000)]
    longer = [tokens - made for tokens in known if tokens > made]
    assert known_lengths(known).rest(made) == pytest.approx(sum(longer) / len(longer), rel=0.25)


def test_the_longer_a_response_of_a_heavy_tail_has_grown_the_longer_it_will_grow() -> None:
    draw = random.Random(1)
    lengths = known_lengths([int(draw.lognormvariate(6.8, 1.2)) for _ in range(8_000)])
    rests = [lengths.rest(made) for made in (1_000, 3_000, 10_000)]
    assert rests == sorted(rests)


def test_nothing_known_means_farther_from_the_end_than_from_the_start() -> None:
    lengths = LengthLearner().curve
    assert lengths.rest(0) == pytest.approx(1_024.0, rel=0.05)
    assert lengths.rest(5_000) == pytest.approx(6_024.0, rel=0.05)
    assert lengths.rest(5_000, budget=100) == 100.0


def test_a_longer_response_than_any_that_was_seen_goes_on_for_longer_than_it_has() -> None:
    edges, shares = LengthLearner().curve.survival()
    assert list(shares) == sorted(shares, reverse=True)
    at = {made: float(np.interp(made, edges, shares)) for made in (80_000, 160_000)}
    assert at[160_000] / at[80_000] == pytest.approx(0.25, rel=0.1)
    assert known_lengths([500] * 4_000).rest(100_000) > 50_000


def test_what_is_new_outweighs_what_is_old() -> None:
    learner = LengthLearner()
    for tokens in [100] * 2 + [4_000] * 6:
        learner.groups_ended([EndedGroup(lengths=[tokens] * 8)] * 400)
    assert learner.curve.rest(0) > 3_000.0


def test_a_length_of_any_size_is_taken() -> None:
    assert known_lengths([0, 1, 10**9]).rest(10**9) >= 0.0


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5, 0.9, 0.98])
def test_a_quantile_is_that_of_the_lengths(share: float) -> None:
    draw = Random(1)
    lengths = sorted(round(draw.lognormvariate(7.0, 1.0)) for _ in range(4_000))
    assert known_lengths(lengths).outlasting([lengths[int(share * 4_000)]])[0] == pytest.approx(1.0 - share, abs=0.015)


def test_responses_that_were_stopped_count_as_longer_than_what_they_made() -> None:
    draw = Random(2)
    lengths = [round(draw.lognormvariate(7.0, 1.0)) for _ in range(4_000)]
    until = [round(draw.lognormvariate(7.5, 0.5)) for _ in lengths]
    both = list(zip(lengths, until, strict=True))
    parts = [both[at : at + 8] for at in range(0, len(both), 8)]
    learner, naive = LengthLearner(), LengthLearner()
    whole = [[one for one, limit in part if one <= limit] for part in parts]
    stopped = [[limit for one, limit in part if one > limit] for part in parts]
    learner.groups_ended(EndedGroup(lengths=a, stopped=b) for a, b in zip(whole, stopped, strict=True))
    naive.groups_ended(EndedGroup(lengths=one) for one in whole)
    assert learner.curve.outlasting([exp(7.0)])[0] == pytest.approx(0.5, abs=0.03)
    assert naive.curve.outlasting([exp(7.0)])[0] < 0.44


def test_lengths_that_are_all_equal_are_foreseen_within_a_tenth() -> None:
    learner = LengthLearner()
    learner.groups_ended([EndedGroup(lengths=[4_000] * 8)] * 64)
    found = learner.forecast(UnfinishedGroup(made=[0] * 8)).quantiles(0)
    assert found.half == pytest.approx(4_000, rel=0.1)
    assert found.expected == pytest.approx(4_000, rel=0.15)


@pytest.mark.parametrize("lengths", [[1], [100], [10**6]])
def test_a_single_length_is_enough(lengths: Sequence[int]) -> None:
    learner = LengthLearner()
    learner.groups_ended([EndedGroup(lengths=lengths)])
    assert learner.known
    one = learner.forecast(UnfinishedGroup(made=[0])).quantiles(0)
    assert 1.0 <= one.tenth <= one.half <= one.longest <= one.ninth


def grouped(draw: Random, share: float, *, size: int = 8, cap: float = 1e9) -> EndedGroup:
    shared = sqrt(share) * draw.gauss()
    lengths = [exp(7.0 + shared + sqrt(1.0 - share) * draw.gauss()) for _ in range(size)]
    return EndedGroup(
        lengths=[round(one) for one in lengths if one <= cap], stopped=[round(cap) for one in lengths if one > cap]
    )


@pytest.mark.parametrize("share", [0.2, 0.6, 0.9])
@pytest.mark.parametrize("size", [4, 16])
def test_the_share_that_groups_have_in_common_is_found(share: float, size: int) -> None:
    draw, learner = Random(1), LengthLearner()
    learner.groups_ended(grouped(draw, share, size=size) for _ in range(400))
    assert learner.intraclass_correlation == pytest.approx(share, abs=0.06)


@pytest.mark.parametrize("share", [0.2, 0.8])
def test_so_it_is_if_many_samples_were_stopped(share: float) -> None:
    draw, learner = Random(2), LengthLearner()
    learner.groups_ended(grouped(draw, share, cap=exp(7.5)) for _ in range(120))
    assert learner.intraclass_correlation == pytest.approx(share, abs=0.12)


@pytest.mark.parametrize("groups", [[], [EndedGroup(lengths=[300])] * 50])
def test_without_groups_of_two_it_is_a_half(groups: list[EndedGroup]) -> None:
    learner = LengthLearner()
    learner.groups_ended(groups)
    assert learner.intraclass_correlation == pytest.approx(0.5, abs=0.01)
