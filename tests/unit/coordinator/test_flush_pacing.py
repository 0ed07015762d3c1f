"""A large fleet flushes less often, a small one as its workers are set."""

import pytest

from ebbtide.coordinator.fleet.flush_intervals import flush_interval_s, interactive_interval_s


@pytest.mark.parametrize(("workers", "interval_s"), [(0, 0.0), (1, 0.0), (250, 0.0), (500, 0.5), (1000, 1.0)])
def test_all_together_flush_a_thousand_times_a_second_at_most(workers: int, interval_s: float) -> None:
    assert flush_interval_s(workers, per_s=1000.0, present_s=0.0) == interval_s


def test_however_large_the_fleet_a_lost_worker_loses_a_few_seconds() -> None:
    assert flush_interval_s(1_000_000, per_s=1000.0, present_s=0.0) == 4.0


def test_small_changes_of_the_fleet_are_not_told() -> None:
    assert flush_interval_s(1100, per_s=1000.0, present_s=1.0) == 1.0
    assert flush_interval_s(1300, per_s=1000.0, present_s=1.0) == 1.3
    assert flush_interval_s(700, per_s=1000.0, present_s=1.0) == 0.7
    assert flush_interval_s(200, per_s=1000.0, present_s=0.3) == 0.0


def test_without_a_limit_nobody_is_told() -> None:
    assert flush_interval_s(100_000, per_s=0.0, present_s=1.0) == 0.0


@pytest.mark.parametrize(("rollouts", "interval_s"), [(0, 0.0), (200, 0.0), (400, 0.1), (800, 0.2), (5000, 0.25)])
def test_up_to_a_number_of_interactive_rollouts_keep_50_ms_and_more_of_them_wait_longer_but_not_than_others(
    rollouts: int, interval_s: float
) -> None:
    assert interactive_interval_s(rollouts, most=200, batch_s=0.0, present_s=0.0) == interval_s


def test_in_a_large_fleet_interactive_rollouts_may_wait_as_long_as_batch_ones() -> None:
    assert interactive_interval_s(1_000_000, most=200, batch_s=1.5, present_s=0.0) == 1.5


def test_a_few_interactive_rollouts_more_or_less_change_no_interval() -> None:
    assert interactive_interval_s(480, most=200, batch_s=0.0, present_s=0.1) == 0.1
    assert interactive_interval_s(560, most=200, batch_s=0.0, present_s=0.1) == 0.14
    assert interactive_interval_s(200, most=200, batch_s=0.0, present_s=0.1) == 0.0


def test_without_a_limit_all_interactive_rollouts_keep_50_ms() -> None:
    assert interactive_interval_s(100_000, most=0, batch_s=0.0, present_s=0.0) == 0.0
