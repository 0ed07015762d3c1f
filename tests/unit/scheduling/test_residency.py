"""Weights go down a level only if memory demands it, and come up only if it pays."""

import random

import pytest

from ebbtide.serving_guard.governor.memory import DeviceMemory, ResidencyPlan
from ebbtide.types.grants import Residency

AWAKE, HOST, AWAY = Residency.AWAKE, Residency.HOST, Residency.AWAY
ROOMY = DeviceMemory(short=0, spare=100, weights=10, host_spare=100, device=True)
SHORT = DeviceMemory(short=1, spare=0, weights=10, host_spare=100, device=True)


def settled(memory: DeviceMemory, at: Residency) -> Residency:
    """Where they go when `memory` stays so for a second."""
    weights = ResidencyPlan()
    weights.decide(0.0, at=at, memory=memory, idle_s=0)
    return weights.decide(1.0, at=at, memory=memory, idle_s=0)


def test_weights_stay_while_nothing_is_short_however_busy_the_host_is() -> None:
    weights = ResidencyPlan()
    for now in range(1000):
        assert weights.decide(now, at=AWAKE, memory=ROOMY, idle_s=0) is AWAKE


def test_memory_that_is_short_for_a_moment_moves_nothing() -> None:
    weights = ResidencyPlan()
    for now in range(0, 100, 2):
        assert weights.decide(now, at=AWAKE, memory=SHORT, idle_s=0) is AWAKE
        assert weights.decide(now + 0.3, at=AWAKE, memory=SHORT, idle_s=0) is AWAKE
        weights.decide(now + 0.6, at=AWAKE, memory=ROOMY, idle_s=0)


@pytest.mark.parametrize(
    ("at", "memory", "goes"),
    [
        (AWAKE, SHORT, HOST),
        (AWAKE, DeviceMemory(short=1, spare=0, weights=10, host_spare=5, device=True), AWAY),
        (AWAKE, DeviceMemory(short=1, spare=0, weights=10, host_spare=100), AWAY),
        (AWAKE, DeviceMemory(short=0, spare=50, weights=10, host_short=5, device=True), AWAKE),
        (HOST, SHORT, HOST),
        (HOST, DeviceMemory(short=0, spare=50, weights=10, host_short=5, device=True), AWAY),
        (AWAY, SHORT, AWAY),
    ],
)
def test_they_go_as_far_down_as_helps_and_no_further(at: Residency, memory: DeviceMemory, goes: Residency) -> None:
    assert settled(memory, at) is goes


@pytest.mark.parametrize(("at", "wake_s"), [(HOST, 2.0), (AWAY, 20.0)])
def test_they_come_up_only_where_the_idle_time_pays_for_it(at: Residency, wake_s: float) -> None:
    for idle_s in (0.0, wake_s, 2.9 * wake_s):
        assert ResidencyPlan().decide(0, at=at, memory=ROOMY, idle_s=idle_s, wake_host_s=2, wake_away_s=20) is at
    assert ResidencyPlan().decide(0, at=at, memory=ROOMY, idle_s=3 * wake_s, wake_host_s=2, wake_away_s=20) is AWAKE


def test_they_do_not_come_up_without_room() -> None:
    memory = DeviceMemory(short=0, spare=9, weights=10, device=True)
    assert ResidencyPlan().decide(0, at=HOST, memory=memory, idle_s=1e9, wake_host_s=1) is HOST


def test_what_just_went_down_does_not_come_up_at_once() -> None:
    weights = ResidencyPlan()
    weights.decide(0.0, at=AWAKE, memory=SHORT, idle_s=1e9, wake_host_s=4)
    assert weights.decide(1.0, at=AWAKE, memory=SHORT, idle_s=1e9, wake_host_s=4) is HOST
    assert weights.decide(2.0, at=HOST, memory=ROOMY, idle_s=1e9, wake_host_s=4) is HOST
    assert weights.decide(5.0, at=HOST, memory=ROOMY, idle_s=1e9, wake_host_s=4) is AWAKE


def test_wake_ups_that_were_not_measured_are_taken_to_be_long() -> None:
    assert ResidencyPlan().decide(0, at=AWAY, memory=ROOMY, idle_s=60) is AWAY
    assert ResidencyPlan().decide(0, at=AWAY, memory=ROOMY, idle_s=600) is AWAKE


@pytest.mark.parametrize("seed", range(20))
def test_more_time_is_harvested_than_is_spent_on_waking_up(seed: int) -> None:
    """If forecasts hold: pressure comes with bursts, and each wake-up is followed by its idle time."""
    generator, weights = random.Random(seed), ResidencyPlan()
    at, now, waking, awake = AWAKE, 0.0, 0.0, 0.0
    for _ in range(50):
        burst, idle = generator.uniform(0, 20), generator.uniform(0, 100)
        end = now + burst
        while now < end:
            at, now = weights.decide(now, at=at, memory=SHORT, idle_s=0, wake_host_s=6), now + 0.1
        end = now + idle
        while now < end:
            wanted = weights.decide(now, at=at, memory=ROOMY, idle_s=end - now, wake_host_s=6)
            waking += 6.0 if wanted < at else 0.0
            at, now = wanted, now + 0.1
            awake += 0.1 if at is AWAKE else 0.0
    assert awake >= 2 * waking
