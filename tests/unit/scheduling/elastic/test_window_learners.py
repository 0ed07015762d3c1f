"""Whether learnt lengths and quantiles are as likely as they say."""

from random import Random

import pytest

from ebbtide.scheduling.elastic.fading_quantiles import FadingQuantiles
from ebbtide.scheduling.elastic.group_lengths import GroupLeft, GroupLengths
from tests.unit.scheduling.elastic.step_left import CAP, drawn_groups, left_of


@pytest.mark.parametrize("share", [0.15, 0.5, 0.85])
def test_the_next_observation_lies_below_a_quantile_as_often_as_it_says(share: float) -> None:
    draw, below, trials = Random(1), 0, 2_000
    learner = FadingQuantiles()
    for at in range(trials + 20):
        value = draw.lognormvariate(0.0, 0.5)
        if at >= 20:
            below += value <= learner.quantile(share)
        learner.observe(value)
    assert below / trials == pytest.approx(share, abs=0.04)


def test_what_is_new_replaces_what_is_old() -> None:
    learner = FadingQuantiles(memory=8)
    for value in [1.0] * 20 + [5.0] * 8:
        learner.observe(value)
    assert learner.quantile(0.1) == 5.0


def test_a_prior_gives_way_to_observations() -> None:
    learner = FadingQuantiles((0.9, 1.0, 1.1))
    assert learner.known
    assert learner.quantile(0.5) == 1.0
    for _ in range(3):
        learner.observe(2.0)
    assert learner.quantile(0.5) == 2.0


def test_nothing_is_known_of_a_learner_without_prior_and_observation() -> None:
    learner = FadingQuantiles()
    learner.observe(float("nan"))
    assert not learner.known


@pytest.mark.parametrize("made", [0, 1_500, 2_500, 4_000, 6_000])
@pytest.mark.parametrize("correlation", [0.3, 0.9])
def test_the_tokens_that_a_step_still_makes_are_foreseen(made: int, correlation: float) -> None:
    draw, lengths = Random(3), GroupLengths()
    lengths.step_ended(drawn_groups(draw, 512, correlation=correlation))
    groups = drawn_groups(draw, 512, correlation=correlation)
    left = left_of(groups, made)
    foreseen = sum(sum(lengths.rests(group, place)) for place, group in enumerate(left))
    actual = sum(one - made for samples in groups for one in samples if one > made)
    assert foreseen == pytest.approx(actual, rel=0.25)


def test_so_is_the_longest_rollout_and_not_only_the_mean() -> None:
    draw, lengths = Random(4), GroupLengths()
    lengths.step_ended(drawn_groups(draw, 512))
    left = left_of(drawn_groups(draw, 512), 6_000)
    longest = max(rest for place, group in enumerate(left) for rest in lengths.rests(group, place))
    assert longest > 0.7 * (CAP - 6_000)


def test_siblings_that_ended_tell_the_length_of_those_that_run() -> None:
    lengths = GroupLengths()
    lengths.step_ended(drawn_groups(Random(5), 512))
    short = GroupLeft(prompt=1, finished=[2_000] * 6, running=[1_500] * 2)
    long = GroupLeft(prompt=1, finished=[9_000] * 6, running=[1_500] * 2)
    assert sum(lengths.rests(short, 0)) < 0.3 * sum(lengths.rests(long, 0))


def test_a_group_whose_samples_all_run_is_no_shorter_than_what_they_made() -> None:
    lengths = GroupLengths()
    lengths.step_ended(drawn_groups(Random(6), 128))
    for place in range(64):
        assert all(rest >= 1.0 for rest in lengths.rests(GroupLeft(prompt=1, running=[50_000] * 8), place))


def test_no_rollout_is_expected_beyond_its_cap() -> None:
    lengths = GroupLengths()
    lengths.step_ended(drawn_groups(Random(6), 128))
    group = GroupLeft(prompt=1, running=[14_000] * 8, cap=CAP)
    assert max(lengths.rests(group, 0)) <= CAP - 14_000
