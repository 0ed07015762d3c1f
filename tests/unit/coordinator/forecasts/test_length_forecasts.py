"""Forecasts of lengths are as likely as they say, and use all that is known."""

from random import Random
from statistics import fmean

import pytest

from ebbtide.coordinator.forecasts.length_learner import EndedGroup, LengthLearner, UnfinishedGroup
from tests.unit.coordinator.forecasts.drawn_lengths import CAP, drawn, ended, open_at, response, taught


@pytest.mark.parametrize("alike", [0.2, 0.6, 0.9])
@pytest.mark.parametrize("size", [4, 16])
def test_of_the_intervals_for_four_in_five_about_four_in_five_cover_the_truth(alike: float, size: int) -> None:
    draw, hits = Random(f"{alike} {size}"), list[bool]()
    for _ in range(3):
        learner = taught(draw, size=size, alike=alike)
        for lengths in drawn(draw, 150, size=size, alike=alike):
            made = draw.choice((0, 300, 900, 2_500))
            group, left = open_at(lengths, made), [one for one in lengths if one > made]
            if left:
                forecast, truth = learner.forecast(group), draw.choice(left)
                hits.append(forecast.length(made, 0.1) <= truth <= forecast.length(made, 0.9))
    assert 0.75 <= fmean(hits) <= 0.85


@pytest.mark.parametrize("made", [0, 500, 2_000])
def test_the_mean_of_what_is_to_come_is_that_of_the_truth(made: int) -> None:
    draw, foreseen, truth = Random(1), 0.0, 0
    for _ in range(3):
        learner = taught(draw)
        for lengths in drawn(draw, 300):
            left = [one for one in lengths if one > made]
            if left:
                foreseen += len(left) * learner.forecast(open_at(lengths, made)).rest(made)
                truth += sum(left) - made * len(left)
    assert foreseen == pytest.approx(truth, rel=0.15)


def test_a_sibling_that_runs_at_eight_thousand_proves_eight_thousand() -> None:
    learner = taught(Random(1))
    alone = learner.forecast(UnfinishedGroup(made=[0] * 8, cap=CAP))
    beside = learner.forecast(UnfinishedGroup(made=[8_000, *[0] * 7], cap=CAP))
    assert beside.rest(0) > 1.5 * alone.rest(0)
    assert beside.length(8_000, 0.1) > 8_000


def test_siblings_that_ended_tell_more_the_more_alike_they_are() -> None:
    short = UnfinishedGroup(finished=[300] * 6, made=[0, 0], cap=CAP)
    long = UnfinishedGroup(finished=[4_000] * 6, made=[0, 0], cap=CAP)
    apart = []
    for alike in (0.2, 0.9):
        learner = taught(Random(1), alike=alike)
        apart.append(learner.forecast(long).length(0, 0.5) / learner.forecast(short).length(0, 0.5))
    assert 1.0 < apart[0] < apart[1]


def test_a_prompt_that_comes_again_is_known_by_its_former_epochs() -> None:
    draw, learner = Random(3), LengthLearner()
    shared = {f"p{at}": draw.gauss() for at in range(200)}
    for _ in range(3):
        learner.groups_ended(ended([response(z, draw, 0.6) for _ in range(8)], name) for name, z in shared.items())
    longest, shortest = max(shared, key=lambda one: shared[one]), min(shared, key=lambda one: shared[one])
    rests = [
        learner.forecast(UnfinishedGroup(made=[0] * 8, prompt=name, cap=CAP)).rest(0)
        for name in (shortest, "", longest)
    ]
    assert rests[0] < 0.5 * rests[1]
    assert rests[2] > 2.0 * rests[1]


def test_intervals_of_known_prompts_are_narrower_and_still_cover_the_truth() -> None:
    draw, learner, hits, ratios = Random(4), LengthLearner(), list[bool](), list[float]()
    shared = {f"p{at}": draw.gauss() for at in range(250)}
    for _ in range(2):
        learner.groups_ended(ended([response(z, draw, 0.8) for _ in range(8)], name) for name, z in shared.items())
    for name, z in shared.items():
        known, new = (learner.forecast(UnfinishedGroup(made=[0] * 8, prompt=one, cap=CAP)) for one in (name, ""))
        low, high = known.length(0, 0.1), known.length(0, 0.9)
        hits.append(low <= response(z, draw, 0.8) <= high)
        ratios.append((high / low) / (new.length(0, 0.9) / new.length(0, 0.1)))
    assert 0.73 <= fmean(hits) <= 0.87
    assert fmean(ratios) < 0.6


def test_no_length_is_below_what_was_made_or_beyond_the_cap() -> None:
    learner = taught(Random(2))
    for made in (0, 1, 700, 16_000, CAP - 1, CAP):
        forecast = learner.forecast(UnfinishedGroup(finished=[100] * 3, made=[made] * 4, cap=CAP))
        found = [forecast.length(made, share) for share in (0.01, 0.5, 0.99)]
        assert found == sorted(found)
        assert all(min(made + 1, CAP) <= one <= CAP for one in found)
        assert min(1.0, CAP - made) <= forecast.rest(made) <= CAP - made


def test_before_any_group_ended_the_open_ones_teach() -> None:
    learner = LengthLearner()
    before = learner.forecast(UnfinishedGroup(made=[0])).rest(0)
    learner.groups_open([UnfinishedGroup(finished=[12_000, 15_000], made=[20_000] * 6)] * 20)
    assert learner.forecast(UnfinishedGroup(made=[0])).rest(0) > 2.0 * before
    assert not learner.known


def test_open_groups_teach_nothing_once_a_group_ended() -> None:
    learner = taught(Random(2))
    before = learner.forecast(UnfinishedGroup(made=[0])).rest(0)
    learner.groups_open([UnfinishedGroup(finished=[12_000], made=[20_000] * 6)] * 20)
    assert learner.forecast(UnfinishedGroup(made=[0])).rest(0) == before


def test_samples_that_were_not_needed_any_more_do_not_make_lengths_seem_short() -> None:
    draw = Random(6)
    raced, whole = LengthLearner(), LengthLearner()
    groups = drawn(draw, 500, size=10)
    whole.groups_ended(ended(lengths) for lengths in groups)
    raced.groups_ended(EndedGroup(lengths=sorted(one)[:8], stopped=[sorted(one)[7]] * 2) for one in groups)
    naive = LengthLearner()
    naive.groups_ended(EndedGroup(lengths=sorted(one)[:8]) for one in groups)
    open_ = UnfinishedGroup(made=[0] * 10, cap=CAP)
    truth, found, without = (one.forecast(open_).rest(0) for one in (whole, raced, naive))
    assert abs(found - truth) < 0.5 * abs(without - truth)


def test_a_stray_sample_does_not_decide_for_its_siblings() -> None:
    learner = taught(Random(7), alike=0.9)
    plain = learner.forecast(UnfinishedGroup(finished=[300] * 6, made=[0], cap=CAP)).rest(0)
    beside = learner.forecast(UnfinishedGroup(finished=[300] * 6, made=[12_000, 0], cap=CAP)).rest(0)
    assert beside < 1.5 * plain


def test_groups_of_which_no_response_ended_teach_nothing_and_break_nothing() -> None:
    learner = LengthLearner()
    learner.groups_ended([EndedGroup(lengths=[], stopped=[500] * 8), EndedGroup(lengths=[], prompt="p")])
    before = learner.known
    learner.groups_ended([EndedGroup(lengths=[900, 1_100], stopped=[1_000])])
    assert (before, learner.known) == (False, True)
    assert 100 < learner.forecast(UnfinishedGroup(made=[0])).length(0, 0.5) < 5_000


def test_steps_that_come_one_after_another_teach_as_they_do_together() -> None:
    draw, one_by_one, together = Random(10), LengthLearner(), LengthLearner()
    steps = [
        [EndedGroup(lengths=sorted(one)[:6], stopped=[sorted(one)[5]] * 2) for one in drawn(draw, 100)]
        for _ in range(4)
    ]
    for step in steps:
        one_by_one.groups_ended(step)
    together.groups_ended(group for step in steps for group in step)
    open_ = UnfinishedGroup(made=[0] * 8, cap=CAP)
    rests = [learner.forecast(open_).rest(0) for learner in (one_by_one, together)]
    assert rests[0] == pytest.approx(rests[1], rel=0.15)
    assert one_by_one.intraclass_correlation == pytest.approx(together.intraclass_correlation, abs=0.05)
