"""Rollout steps' durations are learnt."""

from math import inf

import pytest

from ebbtide.serving_guard.governor.costs import StepTime


def learnt(beside: float = 1.5) -> StepTime:
    steps = StepTime(16)
    for _ in range(50):
        for tokens in (16, 32, 128):
            steps.observe(tokens, 0.004 + 0.0001 * tokens)
    for _ in range(50):
        steps.observe(32, beside * 0.0072, beside=True)
    return steps


def test_nothing_known_is_a_few_tokens_in_endless_time_and_none_in_less() -> None:
    steps = StepTime(16)
    assert steps.tokens_within(inf) == 16
    assert steps.tokens_within(100.0) == 0
    assert steps.predicted(1) == inf


def test_steps_grow_by_doubling_what_was_seen() -> None:
    steps, sizes = StepTime(16), []
    for _ in range(5):
        sizes.append(steps.tokens_within(inf))
        steps.observe(sizes[-1], 0.01)
    assert sizes == [16, 32, 64, 128, 256]


def test_a_step_within_some_time_is_predicted_to_take_no_longer() -> None:
    steps = learnt()
    for beside in (False, True):
        for seconds in (0.01, 0.02, 0.03):
            tokens = steps.tokens_within(seconds, beside=beside)
            assert tokens > 0
            assert steps.predicted(tokens, beside=beside) <= seconds * (1 + 1e-9)
            assert steps.predicted(tokens + 2, beside=beside) > seconds or tokens > 200


def test_beside_served_work_steps_take_twice_as_long_until_seen_and_then_as_seen() -> None:
    steps = StepTime(16)
    for _ in range(50):
        steps.observe(32, 0.01)
    assert steps.predicted(32, beside=True) == pytest.approx(0.02)
    for _ in range(50):
        steps.observe(32, 0.013, beside=True)
    assert steps.predicted(32, beside=True) == pytest.approx(0.013)
    assert steps.predicted(32) == pytest.approx(0.01)


def test_a_step_that_takes_much_longer_than_all_before_overran() -> None:
    steps = learnt()
    assert not steps.overran(32, 0.0075)
    assert steps.overran(32, 0.03)
    assert not StepTime(16).overran(32, 100.0)


def test_what_a_step_takes_at_most_is_of_the_largest_and_no_mean() -> None:
    steps = learnt(beside=1.5)
    assert StepTime(16).most_s == 0.0
    assert steps.most_s >= 1.5 * (0.004 + 0.0001 * 128) * 0.95
    assert steps.usual_s < steps.most_s


def test_a_step_that_hung_for_seconds_moves_neither_bound_nor_mean_by_more_than_a_hiccup() -> None:
    steps = learnt()
    usual_s, most_s = steps.usual_s, steps.most_s
    steps.observe(32, 3.0, beside=True)
    assert steps.usual_s < 1.2 * usual_s
    assert steps.most_s < 1.2 * most_s


def test_steps_beside_served_work_that_are_doubted_come_to_be_unknown_again() -> None:
    steps = learnt(beside=9.0)
    assert steps.predicted(32, beside=True) == pytest.approx(9.0 * 0.0072, rel=0.01)
    for _ in range(50):
        steps.doubt_beside()
    assert steps.predicted(32, beside=True) == pytest.approx(2.0 * 0.0072, rel=0.01)
    steps.doubt_beside()
