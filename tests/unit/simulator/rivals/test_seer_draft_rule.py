"""Seer's split of draft tokens is the printed one, with the results that its authors' rule gives by hand."""

import pytest

from benchmarks.rivals.seer_draft_rule import DraftClasses, printed_budget, printed_split

SURVIVAL = (0.52, 0.40, 0.30, 0.14, 0.11, 0.07, 0.05, 0.04)


@pytest.mark.parametrize(
    ("probes", "others", "budget", "split"),
    [(16, 48, 256, (1, 5)), (16, 48, 128, (1, 2)), (48, 16, 256, (4, 4)), (16, 48, 15, (0, 0)), (16, 0, 256, (8, 0))],
)
def test_the_split_is_that_of_the_printed_steps(probes: int, others: int, budget: int, split: tuple[int, int]) -> None:
    assert printed_split(DraftClasses(probes=probes, others=others, survival=SURVIVAL), budget) == split


def test_no_budget_is_exceeded_and_no_draft_is_longer_than_the_longest() -> None:
    for budget in range(0, 1_000, 7):
        found = printed_split(DraftClasses(probes=5, others=30, survival=SURVIVAL), budget)
        assert 5 * found.probes + 30 * found.others <= budget
        assert max(found) <= 8


def test_the_budget_makes_a_token_take_the_least_time() -> None:
    assert printed_budget(10, 0.5, lambda _: 1.0, 8) == 80
    assert printed_budget(10, 0.5, lambda length: 1.0 + length, 8) == 0
    assert printed_budget(10, 0.9, lambda length: 1.0 + 0.3 * length, 8) > 0
