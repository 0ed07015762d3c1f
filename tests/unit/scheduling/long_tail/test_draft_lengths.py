"""Lengths of drafts bring the most for a budget, and the most by time."""

from itertools import product
from random import Random

import pytest

from benchmarks.long_tail.drafts.draft_cases import alike_case, drawn_case, judged
from benchmarks.long_tail.drafts.draft_part import SURVIVAL
from ebbtide.scheduling.long_tail.drafts.draft_lengths import DraftSlot, best_drafts, drafts_within, expected_worth


@pytest.mark.parametrize("seed", range(20))
def test_no_other_lengths_within_the_budget_bring_more(seed: int) -> None:
    draw = Random(seed)
    slots = [
        DraftSlot(sorted((draw.random() for _ in range(3)), reverse=True), draw.uniform(0.1, 3.0)) for _ in range(4)
    ]
    budget = draw.randint(0, 12)
    best = max(expected_worth(slots, lengths) for lengths in product(range(4), repeat=4) if sum(lengths) <= budget)
    found = drafts_within(slots, budget)
    assert sum(found) <= budget
    assert expected_worth(slots, found) == pytest.approx(best)


@pytest.mark.parametrize(("budget", "least"), [(128, 1.09), (256, 1.12)])
def test_seers_printed_rule_is_exceeded_where_probes_are_few(budget: int, least: float) -> None:
    assert judged(alike_case(16, 48, SURVIVAL, budget)).ratio >= least


def test_it_is_never_below_the_printed_rule() -> None:
    assert not [seed for seed in range(300) if judged(drawn_case(seed)).below]


@pytest.mark.parametrize("seed", range(10))
def test_no_other_lengths_bring_more_by_time(seed: int) -> None:
    draw = Random(seed)
    slots = [DraftSlot(sorted((draw.random() for _ in range(3)), reverse=True), draw.uniform(0.1, 3)) for _ in range(3)]
    steps = [draw.uniform(0.0, 0.4) for _ in range(13)]

    def seconds(tokens: int) -> float:
        return 1.0 + sum(steps[:tokens])

    plan = best_drafts(slots, seconds, most=9)
    rates = (expected_worth(slots, lengths) / seconds(3 + sum(lengths)) for lengths in product(range(4), repeat=3))
    assert plan.worth / plan.step_s == pytest.approx(max(rates))
    assert plan.worth == pytest.approx(expected_worth(slots, plan.lengths))


def test_where_verification_costs_as_much_as_generation_nothing_is_drafted() -> None:
    slots = [DraftSlot((0.5, 0.3))] * 8
    assert list(best_drafts(slots, lambda tokens: 0.01 * tokens, most=16).lengths) == [0] * 8


def test_where_verification_is_free_all_is_drafted() -> None:
    slots = [DraftSlot((0.5, 0.3))] * 8
    assert list(best_drafts(slots, lambda _: 0.01, most=100).lengths) == [2] * 8


def test_the_sample_that_the_step_waits_for_drafts_the_most() -> None:
    lengths = drafts_within([DraftSlot((0.6, 0.4, 0.2), 1.0), DraftSlot((0.6, 0.4, 0.2), 5.0)], 4)
    assert lengths == [1, 3]


def test_a_survival_that_rises_by_mistake_is_taken_as_level() -> None:
    assert drafts_within([DraftSlot((0.2, 0.9)), DraftSlot((0.5,))], 2) == [1, 1]
