"""Limits of scorings follow right answers, and lock none of them out."""

from random import Random

import pytest

from ebbtide.scheduling.long_tail.rewards.reward_limits import (
    FACTOR,
    LEAST_S,
    MOST_CUT,
    MOST_CUT_YOUNG,
    YOUNG,
    RewardLimits,
)

CEILING_S = 30.0


def adaptive() -> RewardLimits:
    return RewardLimits(CEILING_S, adapts=True)


def with_right_answers(took_s: float, number: int, problem: str = "p") -> RewardLimits:
    limits = adaptive()
    for _ in range(number):
        limits.note(problem, took_s, right=True)
    return limits


def scored(limits: RewardLimits, problem: str, takes_s: float, *, right: bool) -> bool:
    """Plays one scoring as a driver does. Returns whether it got to its end."""
    limit_s, explored = limits.limit_s(problem), False
    if takes_s > limit_s and (explored := limits.explores(problem)):
        limit_s = limits.ceiling_s
    done = takes_s <= limit_s
    limits.note(problem, min(takes_s, limit_s), right=right and done, explored=explored)
    return done


def test_without_a_right_answer_the_ceiling_holds() -> None:
    limits = adaptive()
    limits.note("p", 25.0, right=False)
    assert limits.limit_s("p") == CEILING_S


def test_the_limit_is_a_multiple_of_the_longest_right_answer_between_its_bounds() -> None:
    for took_s, wanted_s in ((0.1, LEAST_S), (4.0, FACTOR * 4.0), (29.0, CEILING_S)):
        assert with_right_answers(took_s, YOUNG).limit_s("p") == pytest.approx(wanted_s)


def test_a_limit_that_does_not_adapt_is_the_ceiling_and_explores_nothing() -> None:
    limits = RewardLimits(CEILING_S, adapts=False)
    limits.note("p", 0.1, right=True)
    assert limits.limit_s("p") == CEILING_S
    assert not limits.explores("p")


def test_a_young_problem_gets_what_the_slowest_right_answer_of_any_problem_took() -> None:
    limits = with_right_answers(8.0, 1, "slow")
    limits.note("young", 0.1, right=True)
    assert limits.limit_s("unseen") == limits.limit_s("young") == FACTOR * 8.0
    for _ in range(YOUNG):
        limits.note("young", 0.1, right=True)
    assert limits.limit_s("young") == LEAST_S


@pytest.mark.parametrize(("right", "most"), [(1, MOST_CUT_YOUNG), (YOUNG, MOST_CUT)])
def test_a_slow_right_answer_gets_through_within_the_stated_tries_whatever_else_is_cut(right: int, most: int) -> None:
    for seed in range(200):
        draw, limits = Random(seed), with_right_answers(1.0, right)
        for other in range(draw.randrange(60)):  # endless loops of other problems make exploring seldom
            scored(limits, f"other {other}", 1e9, right=False)
        tries = next(number for number in range(1, 100) if scored(limits, "p", 12.0, right=True))
        assert tries <= most + 1
        assert limits.limit_s("p") == FACTOR * 12.0  # from here on it is no longer slow
        assert scored(limits, "p", 12.0, right=True)


def test_right_answers_that_are_always_slow_get_through_while_wrong_ones_of_the_problem_loop() -> None:
    for seed in range(50):
        draw, limits = Random(seed), with_right_answers(1.0, YOUNG)
        tries = 0
        while limits.limit_s("p") < FACTOR * 12.0:
            right = draw.random() < 0.5
            tries += right
            scored(limits, "p", 12.0 if right else 1e9, right=right)
            assert tries <= 64


def test_endless_loops_cost_little_once_exploring_has_found_nothing() -> None:
    limits = with_right_answers(1.0, 1, "known")
    spent_s = 0.0
    for number in range(1000):
        problem = f"p{number}"
        spent_s += CEILING_S if scored(limits, problem, 1e9, right=False) or limits.explores(problem) else LEAST_S
    assert spent_s < 0.25 * 1000 * CEILING_S


def test_an_explored_right_answer_makes_exploring_more_frequent_again() -> None:
    limits = with_right_answers(1.0, 1, "known")
    for number in range(400):
        if limits.explores(f"loop {number}"):
            limits.note(f"loop {number}", CEILING_S, right=False, explored=True)
    seldom = sum(limits.explores(f"then {number}") for number in range(160))
    for number in range(4):
        limits.note(f"found {number}", 1.0, right=True, explored=True)
    often = sum(limits.explores(f"later {number}") for number in range(160))
    assert often >= 4 * seldom > 0
