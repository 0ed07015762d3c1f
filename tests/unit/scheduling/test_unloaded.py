"""The latency of an unloaded engine is learnt."""

from math import inf

import pytest

from ebbtide.serving_guard.governor.costs import LEARNT, UnloadedLatency


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
