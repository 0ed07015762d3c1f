"""A run's forecasts follow what the coordinator hears of its rollouts, within bounded work and memory."""

from math import exp, sqrt
from random import Random
from statistics import fmean
from typing import Any

import pytest

from ebbtide.coordinator.forecasts import run_forecasts
from ebbtide.coordinator.forecasts.length_learner import LengthQuantiles, UnfinishedGroup
from ebbtide.coordinator.forecasts.run_forecasts import KnownGroup, RunForecasts
from tests.unit.coordinator.forecasts.drawn_lengths import CAP, drawn
from tests.unit.coordinator.forecasts.live_groups import Sample, begin, name_of, play, submit


def taught(groups: int = 64, alike: float = 0.8) -> tuple[RunForecasts, float]:
    forecasts, now = RunForecasts(groups), 0.0
    for step in range(4):
        now += 1.0
        play(forecasts, 1_000 * step, drawn(Random(step), groups, alike=alike), now)
    return forecasts, now


def foreseen(forecasts: RunForecasts, group: KnownGroup, name: str) -> LengthQuantiles:
    found = forecasts.quantiles(group, name)
    assert found is not None
    return found


def test_whole_steps_teach_lengths_and_leave_nothing_behind() -> None:
    forecasts, _ = taught()
    assert forecasts.known
    assert not list(forecasts.groups)


def test_a_sibling_that_ended_long_makes_the_waiting_ones_long_after_one_renewal() -> None:
    forecasts, now = taught()
    group = submit(forecasts, 9_000, 4)
    begin(forecasts, 9_000, [0])
    before = forecasts.unstarted(group).expected
    forecasts.finish(name_of(9_000, 0), 9_000, 8_000, whole=True)
    assert forecasts.unstarted(group).expected == before
    assert group in forecasts.renew(now + 1.0)
    assert forecasts.unstarted(group).expected > 1.5 * before


def test_a_running_sibling_that_has_made_much_proves_as_much() -> None:
    forecasts, now = taught()
    group = submit(forecasts, 9_000, 4)
    (sample,) = begin(forecasts, 9_000, [0])
    before = forecasts.unstarted(group).expected
    sample.made = 8_000
    forecasts.renew(now + 1.0)
    forecasts.renew(now + 2.0)
    assert forecasts.unstarted(group).expected > 1.5 * before


def test_what_is_still_to_come_falls_with_each_token_without_a_new_forecast() -> None:
    forecasts, now = taught()
    group = submit(forecasts, 9_000, 2)
    (sample,) = begin(forecasts, 9_000, [0])
    forecasts.renew(now + 1.0)
    before = foreseen(forecasts, group, name_of(9_000, 0))
    sample.made = 40
    assert foreseen(forecasts, group, name_of(9_000, 0)).expected == pytest.approx(before.expected - 40)


def test_a_cancelled_sample_counts_as_longer_than_what_it_made() -> None:
    forecasts, _ = taught()
    group = submit(forecasts, 9_000, 3)
    (sample,) = begin(forecasts, 9_000, [0])
    sample.made = 700
    forecasts.cancel(name_of(9_000, 0), 9_000)
    assert list(group.stopped) == [700]


def test_a_group_whose_samples_all_ended_is_forgotten_once_it_has_taught() -> None:
    forecasts = RunForecasts(1)
    submit(forecasts, 0, 2)
    begin(forecasts, 0, [0, 1])
    for number in range(2):
        forecasts.finish(name_of(0, number), 0, 500, whole=True)
    forecasts.renew(1.0)
    assert not list(forecasts.groups)
    assert forecasts.learner.known


def test_groups_that_end_while_nothing_is_taught_are_kept_up_to_a_bound_from_all_that_ended(monkeypatch: Any) -> None:
    monkeypatch.setattr(run_forecasts, "_MOST_UNTAUGHT", 64)
    forecasts = RunForecasts(8)
    for place in range(1_000, 1_064):
        submit(forecasts, place, 1)
    for place in range(128):  # no call of `renew`: forecasts give way
        submit(forecasts, place, 1)
        begin(forecasts, place, [0])
        forecasts.finish(name_of(place, 0), place, 500, whole=True)
    kept = [group.place for group in forecasts.groups if group.finished]
    assert 32 <= len(kept) <= 64
    assert min(kept) < 32
    assert max(kept) > 96
    waiting = len(list(forecasts.groups)) - len(kept)
    assert waiting == 64
    forecasts.forget_open()
    forecasts.settle_all()  # all of these have ended meanwhile
    assert len(list(forecasts.groups)) <= 64
    forecasts.renew(1.0)
    assert forecasts.learner.known
    assert not list(forecasts.groups)


def test_a_prompt_of_a_former_epoch_is_known_before_any_of_its_samples() -> None:
    forecasts, now = RunForecasts(64), 0.0
    draw = Random(5)
    steps = [drawn(draw, 64, alike=0.9) for _ in range(1)] * 3
    for step, groups in enumerate(steps):
        for at, lengths in enumerate(groups):
            submit(forecasts, 1_000 * step + at, len(lengths), prompt=f"p{at}")
        play(forecasts, 1_000 * step, groups, now := now + 1.0)
    means = [sum(lengths) for lengths in steps[0]]
    long, short = means.index(max(means)), means.index(min(means))
    known = [forecasts.unstarted(submit(forecasts, 9_000 + at, 8, prompt=f"p{at}")) for at in (long, short)]
    assert known[0].expected > 2.0 * known[1].expected


def test_before_a_group_has_ended_the_first_responses_teach() -> None:
    forecasts = RunForecasts(64)
    for place in range(64):
        submit(forecasts, place, 8)
        begin(forecasts, place, range(8))
        forecasts.finish(name_of(place, 0), place, 200, whole=True)
    before = forecasts.known
    forecasts.renew(1.0)
    assert (before, forecasts.known, forecasts.learner.known) == (False, True, False)


def test_intervals_cover_about_four_in_five_of_the_next_step() -> None:
    forecasts, now = taught(groups=128, alike=0.6)
    forecasts.coverage.take()
    for step in range(4):
        play(forecasts, 10_000 * (step + 1), drawn(Random(100 + step), 128, alike=0.6), now + step + 1.0)
    count = forecasts.coverage.take()
    assert count.ended == 4 * 128 * 8
    assert 0.75 <= count.covered / count.ended <= 0.85
    assert forecasts.coverage.take() == (0, 0)


def test_one_renewal_foresees_a_bounded_number_of_samples() -> None:
    forecasts, now = taught()
    for place in range(9_000, 9_400):
        submit(forecasts, place, 8)
        begin(forecasts, place, [0, 1])
        forecasts.finish(name_of(place, 0), place, 900, whole=True)
    renewed = forecasts.renew(now + 1.0)
    assert 0 < len(renewed) <= 16
    assert forecasts.renew(now + 1.01) == []


def test_what_is_read_back_is_known_anew_and_what_is_gone_is_forgotten() -> None:
    forecasts, now = taught()
    submit(forecasts, 9_000, 2)
    submit(forecasts, 9_001, 2)
    forecasts.forget_open()
    submit(forecasts, 9_001, 1)
    forecasts.settle_all()
    assert {group.place for group in forecasts.groups if group.waiting} == {9_001}
    forecasts.finish(name_of(9_001, 0), 9_001, 600, whole=True)
    forecasts.renew(now + 1.0)
    assert not list(forecasts.groups)


def test_a_begun_sample_that_is_read_back_tells_nothing_of_other_groups() -> None:
    forecasts, now = taught()
    fresh, _ = taught()
    untouched = fresh.unstarted(submit(fresh, 9_010, 4))
    read_back = forecasts.wait(name_of(9_000, 0), 9_000, Sample(8_000), cap=CAP)
    assert read_back in forecasts.renew(now + 1.0)
    assert forecasts.unstarted(read_back).expected > 1.5 * untouched.expected
    assert forecasts.unstarted(submit(forecasts, 9_010, 4)) == untouched


def test_while_nobody_reads_forecasts_groups_teach_and_no_forecast_is_made() -> None:
    forecasts, now = taught()
    forecasts.renew(now + 1.0, read=False)
    group = submit(forecasts, 9_000, 2)
    begin(forecasts, 9_000, [0, 1])
    assert forecasts.renew(now + 2.0, read=False) == []
    assert group.unstarted is None
    forecasts.finish(name_of(9_000, 0), 9_000, 500, whole=True)
    assert group in forecasts.renew(now + 3.0)
    assert group.unstarted is not None


def log_normal(draw: Random, groups: int) -> list[list[int]]:
    """Lengths with a median of 2,000, of which half of the variance is shared within groups."""
    shared = [draw.gauss() for _ in range(groups)]
    return [[round(2_000.0 * exp(sqrt(0.5) * (one + draw.gauss()))) for _ in range(8)] for one in shared]


def play_by_length(forecasts: RunForecasts, first: int, groups: list[list[int]], now: float) -> float:
    """An on-policy step: all begin together, and the short ones end first, while forecasts are renewed."""
    for at in range(len(groups)):
        submit(forecasts, first + at, 8, cap=1 << 20)
        begin(forecasts, first + at, range(8), cap=1 << 20)
    ends = sorted((tokens, at, number) for at, lengths in enumerate(groups) for number, tokens in enumerate(lengths))
    for count, (tokens, at, number) in enumerate(ends):
        forecasts.finish(name_of(first + at, number), first + at, tokens, whole=True)
        if count % 64 == 0:
            forecasts.renew(now := now + 0.1, read=False)
    forecasts.renew(now + 0.1, read=False)
    return now + 0.1


@pytest.mark.parametrize("groups", [384, 1_024, 2_048])
def test_all_of_a_large_step_teaches_though_its_short_groups_end_first(groups: int) -> None:
    forecasts, draw, now = RunForecasts(groups), Random(groups), 0.0
    for step in range(3):
        now = play_by_length(forecasts, 10_000 * step, log_normal(draw, groups), now)
    hits, halves = list[bool](), list[float]()
    for at, lengths in enumerate(log_normal(draw, 512)):
        one = forecasts.unstarted(submit(forecasts, 90_000 + at, 8, cap=1 << 20))
        hits += [one.tenth <= tokens <= one.ninth for tokens in lengths]
        halves.append(one.half)
    assert 0.75 <= fmean(hits) <= 0.85
    assert fmean(halves) == pytest.approx(2_000.0, rel=0.15)
    assert forecasts.learner.intraclass_correlation == pytest.approx(0.5, abs=0.08)


def test_a_forecast_of_a_group_with_a_thousand_samples_tells_apart_some_dozens_of_lengths() -> None:
    forecasts, now = taught()
    group = submit(forecasts, 9_000, 2_000)
    for number, sample in enumerate(begin(forecasts, 9_000, range(1_000))):
        sample.made = 100 + 7 * number
    for number in range(1_000, 1_900):
        forecasts.finish(name_of(9_000, number), 9_000, 50 + number, whole=True)
    assert group in forecasts.renew(now + 1.0)
    assert len({one.made for one in group.quantiles.values()}) <= 48
    assert foreseen(forecasts, group, name_of(9_000, 999)).tenth > 0


def test_what_is_known_of_a_large_group_is_what_all_of_its_samples_tell() -> None:
    forecasts, now = taught()
    group = submit(forecasts, 9_000, 600)
    samples = begin(forecasts, 9_000, range(600))
    for sample in samples:
        sample.made = 3_000
    for number in range(500):
        forecasts.finish(name_of(9_000, number), 9_000, 500 + 4 * number, whole=True)
    forecasts.renew(now + 1.0)
    found = foreseen(forecasts, group, name_of(9_000, 599))
    whole = UnfinishedGroup(finished=group.finished, made=[3_000] * 100, cap=CAP)
    assert found.half == pytest.approx(forecasts.learner.forecast(whole).quantiles(3_000).half, rel=0.15)


def test_a_sample_that_outgrew_its_forecast_has_its_turn_while_others_end_all_the_time() -> None:
    forecasts, now = taught()
    for place in range(9_000, 9_400):
        submit(forecasts, place, 64)
        samples = begin(forecasts, place, range(64))
        if place == 9_300:
            grown = samples[0]
    group = forecasts.group(9_300)
    assert group is not None
    before = forecasts.unstarted(group).expected
    grown.made = 9_000
    for number in range(60):
        for place in range(9_000, 9_300):
            forecasts.finish(name_of(place, number), place, 600, whole=True)
        forecasts.renew(now := now + 0.05)
    assert forecasts.unstarted(group).expected > 1.5 * before


def test_a_sample_that_outgrew_its_forecast_has_its_turn_where_one_group_takes_all_of_a_renewal() -> None:
    forecasts, now = taught()
    large = range(9_000, 9_020)
    for place in large:
        submit(forecasts, place, 64)
        for number, sample in enumerate(begin(forecasts, place, range(64))):
            sample.made = round(20 * 1.1**number)  # each needs an quantiles of its own
    group = submit(forecasts, 9_500, 64)
    grown = begin(forecasts, 9_500, range(64))[0]
    assert group is not None
    before = forecasts.unstarted(group).expected
    grown.made = 9_000
    for number in range(8):
        for place in large:
            forecasts.finish(name_of(place, number), place, 600, whole=True)
        for _ in range(30):  # fewer than all of these take
            forecasts.renew(now := now + 0.05)
    assert forecasts.unstarted(group).expected > 1.5 * before
