"""Steps, prefills and decodes are predicted by a line through observations and a quantile above it."""

from math import inf
from random import Random

import pytest

from ebbtide.serving_guard.governor.costs import ENOUGH, LEARNT, CostLine, RecentValues, StepTime, UnloadedLatency


def line(sizes: list[int], noise: float = 0.0, count: int = 200) -> CostLine:
    random, fitted = Random(1), CostLine()
    for number in range(count):
        size = sizes[number % len(sizes)]
        fitted.observe(size, (0.004 + 0.0001 * size) * random.lognormvariate(0.0, noise))
    return fitted


def test_a_line_is_found() -> None:
    fitted = line([16, 64, 256])
    assert fitted.predicted(128) == pytest.approx(0.004 + 0.0128, rel=0.01)
    assert fitted.size_within(0.004 + 0.0128) == pytest.approx(128, rel=0.02)


def test_nineteen_of_twenty_are_no_more_than_predicted() -> None:
    fitted, random = line([16, 64, 256], noise=0.3, count=400), Random(2)
    over = sum((0.004 + 0.0064) * random.lognormvariate(0.0, 0.3) > fitted.predicted(64) for _ in range(2000))
    assert 0.02 < over / 2000 < 0.10


def test_of_one_size_alone_larger_ones_cost_in_proportion_and_smaller_ones_as_much() -> None:
    fitted = line([32])
    assert fitted.typical(64) == pytest.approx(2 * fitted.typical(32))
    assert fitted.typical(4) == pytest.approx(fitted.typical(32))


def test_nothing_known_is_endless_and_little_known_is_taken_twice() -> None:
    fitted = CostLine()
    assert fitted.predicted(1) == inf
    assert fitted.size_within(100.0) == 0.0
    fitted.observe(10, 1.0)
    assert fitted.predicted(10) == pytest.approx(2.0)
    for _ in range(ENOUGH):
        fitted.observe(10, 1.0)
    assert fitted.predicted(10) == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(20))
def test_predictions_never_fall_with_size_and_sizes_within_keep_to_them(seed: int) -> None:
    random, fitted = Random(seed), CostLine()
    for _ in range(random.randrange(1, 300)):
        fitted.observe(random.choice((1, 8, 32, 500)), random.expovariate(100.0))
    predicted = [fitted.predicted(size) for size in range(0, 1000, 7)]
    assert predicted == sorted(predicted)
    for cost in (0.001, 0.01, 0.1):
        size = fitted.size_within(cost)
        assert size in {0.0, inf} or fitted.predicted(size) <= cost * (1 + 1e-9)


def test_one_hiccup_bends_little_and_a_lasting_change_is_believed() -> None:
    fitted = line([16, 64])
    fitted.observe(64, 10.0)
    assert fitted.typical(64) < 1.1 * (0.004 + 0.0064)
    for _ in range(600):
        fitted.observe(16, 0.1)
        fitted.observe(64, 0.2)
    assert fitted.typical(64) == pytest.approx(0.2, rel=0.1)


@pytest.mark.parametrize("bad", [0.0, -1.0, inf, float("nan")])
def test_what_no_work_costs_teaches_nothing(bad: float) -> None:
    fitted = CostLine()
    fitted.observe(bad, 1.0)
    fitted.observe(1.0, bad)
    assert fitted.count == 0


def test_only_the_last_ones_count() -> None:
    recent = RecentValues(10)
    assert recent.quantile(0.5) == 0.0
    for value in range(100):
        recent.add(float(value))
    assert (len(recent), recent.quantile(0.0), recent.quantile(0.5), recent.quantile(1.0)) == (10, 90.0, 94.0, 99.0)


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


def test_nothing_is_known_at_first() -> None:
    unloaded = UnloadedLatency()
    assert (unloaded.prefill_s(10), unloaded.decode_s(1)) == (inf, inf)
    assert (unloaded.ttft_s(99.0), unloaded.tpot_s(99.0)) == (0.0, 0.0)
    assert unloaded.decode_s(0) == 0.0


def test_prefill_speed_and_its_fixed_part_are_learnt() -> None:
    unloaded = UnloadedLatency()
    for number in range(100):
        prompt = 100 + 50 * (number % 10)
        unloaded.began(prompt, 0.01 + 0.0002 * prompt)
    assert unloaded.typical_prefill_s(1000) == pytest.approx(0.21, rel=0.01)
    assert unloaded.typical_prefill_s(10) == pytest.approx(0.012, rel=0.05)


def test_more_requests_in_a_step_never_make_it_shorter() -> None:
    unloaded = UnloadedLatency()
    for number in range(100):
        unloaded.decoded(1 + number % 4, 0.02 - 0.001 * (number % 4))
    steps = [unloaded.decode_s(batch) for batch in range(1, 50)]
    assert steps == sorted(steps)


def test_percentiles_hold_once_enough_requests_were_alone() -> None:
    unloaded = UnloadedLatency()
    for _ in range(1, LEARNT):
        unloaded.began(10, 0.1)
        unloaded.finished(10, 0.1)
    assert unloaded.ttft_s(50.0) == 0.0
    unloaded.began(10, 0.5)
    unloaded.finished(10, 0.3)
    assert (unloaded.ttft_s(50.0), unloaded.ttft_s(99.0)) == (0.1, 0.5)
    assert (unloaded.tpot_s(50.0), unloaded.tpot_s(99.0)) == (0.01, 0.03)
