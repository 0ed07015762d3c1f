"""Laws of turns on shared devices, and how far the rule is from the best order."""

import random
from itertools import permutations
from math import inf

import pytest

from ebbtide.coordinator.rules.phase_turns import (
    MOST_PASSED,
    Returning,
    TailMerging,
    TurnMember,
    Waiter,
    play,
    rollout_ends,
    slack_s,
    whose_turn,
)


def waiter(
    own: float = 10.0, *, slack: float = inf, waited: float = 0.0, passed: int = 0, after: float = 10.0
) -> Waiter:
    return Waiter(
        slack=slack, waited=waited, passed=passed, own=own, after=after, place=0, place_free=0.0, round=own + after
    )


def member(rollout: float, train: float, unit: int, bound: float = inf) -> TurnMember:
    return TurnMember((rollout,), (train,), unit, bound)


# -- whose turn --------------------------------------------------------------------------------------------------------


def test_whose_bound_the_others_phase_would_break_goes_first() -> None:
    assert whose_turn([waiter(waited=50.0, slack=500.0), waiter(slack=5.0)]) == 1


def test_of_two_whose_bounds_are_near_the_one_with_less_slack_goes_first() -> None:
    assert whose_turn([waiter(slack=6.0), waiter(slack=3.0), waiter(slack=9.0)]) == 1


def test_a_run_of_higher_priority_goes_first_but_for_one_that_was_passed_over_often() -> None:
    urgent, often = waiter(slack=1.0, waited=9.0), waiter(passed=MOST_PASSED)
    assert whose_turn([urgent, waiter()._replace(priority=1)]) == 1
    assert whose_turn([often, waiter()._replace(priority=1)]) == 0


def test_short_rounds_pass_long_ones_while_no_bound_is_near() -> None:
    assert whose_turn([waiter(560.0, after=888.0, waited=9.0), waiter(77.0, after=81.0)]) == 1


def test_equal_runs_go_in_the_order_in_which_they_came() -> None:
    assert whose_turn([waiter(waited=1.0), waiter(waited=3.0), waiter(waited=2.0)]) == 1


def test_a_device_waits_for_a_run_that_is_due_only_if_its_bound_would_break() -> None:
    long = waiter(100.0, slack=1_000.0)
    assert whose_turn([long], [Returning(due=20.0, slack=5.0, own=50.0)]) is None
    assert whose_turn([long], [Returning(due=20.0, slack=85.0, own=50.0)]) == 0
    assert whose_turn([long], [Returning(due=101.0, slack=0.0, own=50.0)]) == 0


def test_a_shorter_run_goes_in_between_while_the_device_waits() -> None:
    due = [Returning(due=20.0, slack=5.0, own=50.0)]
    assert whose_turn([waiter(100.0, waited=9.0), waiter(19.0)], due) == 1


def test_a_device_does_not_wait_where_that_breaks_the_bound_of_the_run_that_waits() -> None:
    assert whose_turn([waiter(100.0, slack=30.0)], [Returning(due=20.0, slack=5.0, own=50.0)]) == 0


def test_nobody_starves_whatever_the_others_are() -> None:
    draw = random.Random(3)
    for _ in range(50):
        waiting = [waiter(draw.uniform(1, 100), slack=draw.uniform(-50, 500)) for _ in range(4)]
        passed = [0] * 4
        for now in range(200):
            due = [Returning(draw.uniform(0, 50), draw.uniform(-9, 9), draw.uniform(1, 9)) for _ in range(2)]
            asked = [
                one._replace(passed=number, waited=float(number)) for one, number in zip(waiting, passed, strict=True)
            ]
            chosen = whose_turn(asked, due if now % 2 else [])
            if chosen is None:
                continue
            passed = [0 if at == chosen else number + 1 for at, number in enumerate(passed)]
            assert max(passed) <= MOST_PASSED + len(waiting) - 1


def test_earlier_speed_counts_for_a_few_rounds_and_a_run_without_bound_has_all_the_slack() -> None:
    assert slack_s(1e6, 1e6, 1.5, 100.0) == pytest.approx(200.0)
    assert slack_s(100.0, 160.0, 1.5, 100.0) == pytest.approx(-10.0)
    assert slack_s(100.0, 1e6, inf, 100.0) == inf


# -- tails -------------------------------------------------------------------------------------------------------------


def test_a_rollout_beside_a_tail_loses_the_tails_share_of_the_unit() -> None:
    merging = TailMerging(share=0.25, kept=0.25)
    assert rollout_ends(0.0, 100.0, 0.0, merging) == (75.0, 100.0)
    main, end = rollout_ends(0.0, 100.0, 20.0, merging)
    assert main == pytest.approx(80.0)
    assert end == pytest.approx(105.0)


def test_a_tail_that_would_meet_another_keeps_its_unit() -> None:
    main, end = rollout_ends(0.0, 8.0, 50.0, TailMerging(share=0.25, kept=0.25))
    assert main == end == pytest.approx(10.0)


def test_merged_tails_let_two_rollouts_share_a_unit_for_less() -> None:
    runs = [member(300, 50, 0), member(300, 50, 0)]
    plain, merged = play(runs), play(runs, TailMerging(share=0.25, kept=0.25))
    assert plain[0].slowdown == pytest.approx(600 / 350, rel=0.02)
    assert 1.0 <= merged[0].slowdown < 0.9 * plain[0].slowdown


# -- forecasts of groups -----------------------------------------------------------------------------------------------


def test_a_run_alone_is_as_fast_as_alone() -> None:
    assert play([member(134, 113, 0)])[0].slowdown == 1.0


def test_short_runs_beside_a_long_one_keep_their_speed() -> None:
    """Strict round robin would double their rounds."""
    runs = [member(250, 100, 0), member(250, 100, 1), member(600, 100, 2)]
    assert max(one.slowdown for one in play(runs)) < 1.1


def test_a_device_that_is_full_slows_runs_down_by_its_load() -> None:
    runs = [member(134, 113, unit) for unit in range(3)]
    assert [one.slowdown for one in play(runs)] == pytest.approx([3 * 113 / 247] * 3, rel=0.02)


def test_a_run_with_a_near_bound_keeps_it_beside_runs_with_far_ones() -> None:
    found = play([member(134, 113, 0, 1.05), member(134, 113, 1, 2.5), member(134, 113, 1, 2.5)])
    assert found[0].slowdown <= 1.05
    assert max(one.slowdown for one in found) <= 2.5


# -- the best order ----------------------------------------------------------------------------------------------------


def mean_end(order: tuple[int, ...], runs: list[TurnMember]) -> float:
    """The mean time at which runs, each with its own unit, have ended two rounds, by their time alone, where the
    trainer takes them in this order.
    """
    now = 0.0
    ready = [one.rollout[0] for one in runs]
    for at in order:
        now = max(now, ready[at]) + runs[at].train[0]
        ready[at] = now + runs[at].rollout[0]
    ends = [
        (after - one.rollout[0]) / (2 * (one.rollout[0] + one.train[0])) for after, one in zip(ready, runs, strict=True)
    ]
    return sum(ends) / len(ends)


def by_rule(runs: list[TurnMember]) -> tuple[int, ...]:
    now, order = 0.0, list[int]()
    ready = [one.rollout[0] for one in runs]
    while len(order) < 2 * len(runs):
        left = [at for at in range(len(runs)) if order.count(at) < 2]
        now = max(now, min(ready[at] for at in left))
        waiting = [at for at in left if ready[at] <= now]
        asked = [
            waiter(runs[at].train[0], waited=now - ready[at], after=runs[at].rollout[0])._replace(place=at)
            for at in waiting
        ]
        chosen = whose_turn(asked)
        assert chosen is not None, "nobody is due whose bound could break"
        at = waiting[chosen]
        now += runs[at].train[0]
        ready[at] = now + runs[at].rollout[0]
        order.append(at)
    return tuple(order)


def test_the_rule_is_near_the_best_of_all_orders() -> None:
    draw = random.Random(7)
    ratios = []
    for _ in range(30):
        runs = [member(draw.uniform(50, 600), draw.uniform(50, 300), unit) for unit in range(3)]
        best = min(mean_end(order, runs) for order in set(permutations([0, 1, 2] * 2)))
        ratios.append(mean_end(by_rule(runs), runs) / best)
    assert sum(ratios) / len(ratios) < 1.05
    assert max(ratios) < 1.25
