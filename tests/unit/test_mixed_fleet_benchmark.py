"""What the comparison of mixed fleets makes of its simulations."""

from benchmarks.elastic.mixed_fleet import (
    ORACLE,
    OURS,
    MixedResult,
    bound_s,
    mixed_fleet_over_oracle,
    over_bound,
)
from benchmarks.elastic.mixed_setting import FAST, SLOW, MixedCase, cases, engines


def result(policy: str, generated_s: float, case: str = "half", seed: int = 0) -> MixedResult:
    return MixedResult(
        case=case, seed=seed, policy=policy, generated_s=generated_s, bound_s=50.0, step_s=[generated_s], moves=0,
        preemptions=0,
    )  # fmt: skip


def test_the_figure_is_the_worst_of_all_cases_and_seeds() -> None:
    results = [
        result(OURS, 101.0), result(ORACLE, 100.0), result(OURS, 106.0, seed=1), result(ORACLE, 100.0, seed=1),
        result(OURS, 198.0, "one fast"), result(ORACLE, 200.0, "one fast"), result("without kinds", 120.0),
    ]  # fmt: skip
    assert mixed_fleet_over_oracle(results) == 1.06
    assert over_bound(results) == 3.96


def test_without_both_policies_there_is_no_figure() -> None:
    assert mixed_fleet_over_oracle([result(OURS, 100.0)]) is None
    assert over_bound([]) is None


def test_slow_engines_take_three_times_as_long_for_all_that_a_step_does() -> None:
    for case in cases(1, [0]):
        costs = {pool: profile.costs for pool, profile in engines(case).items()}
        for batch, context, prefill in ((1, 100, 0), (64, 200_000, 0), (8, 9_000, 512)):
            fast, slow = (costs[pool].step_s(batch=batch, context=context, prefill=prefill) for pool in (FAST, SLOW))
            assert abs(slow / fast - 3.0) < 1e-9


def test_no_fleet_is_bound_to_be_faster_than_a_larger_one() -> None:
    few, more = MixedCase("few", fast=1, slow=1, slots=8, steps=1), MixedCase("more", fast=3, slow=3, slots=8, steps=1)
    assert bound_s(few) >= bound_s(more) > 0.0
