"""Who comes and goes too often gets no work for a while."""

import pytest

from ebbtide.coordinator.fleet.worker_health import WorkerTrust
from ebbtide.coordinator.state.coordinator_state import CoordinatorState


def test_one_loss_is_forgiven_and_the_pauses_double_from_the_second_on() -> None:
    flapping, pauses = WorkerTrust(CoordinatorState(lambda: 0.0)), []
    for number in range(10):
        flapping.lost("w", float(number))
        pauses.append(flapping.quarantined_s("w", float(number)))
    assert pauses == [0.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0, 300.0]
    assert flapping.quarantined_s("w", 109.0) == 200.0
    assert flapping.quarantined_s("w", 309.0) == 0.0


def test_who_has_stayed_long_enough_starts_anew() -> None:
    flapping = WorkerTrust(CoordinatorState(lambda: 0.0))
    flapping.lost("w", 0.0)
    flapping.lost("w", 700.0)
    assert flapping.quarantined_s("w", 700.0) == 0.0


def test_workers_are_judged_by_their_own_losses() -> None:
    flapping = WorkerTrust(CoordinatorState(lambda: 0.0))
    for _ in range(3):
        flapping.lost("w", 0.0)
    assert flapping.quarantined_s("v", 0.0) == 0.0


def test_one_that_stayed_for_a_minute_has_no_strike_however_often_its_stream_ends() -> None:
    """As behind a proxy that ends connections every five minutes."""
    flapping, now = WorkerTrust(CoordinatorState(lambda: 0.0)), 0.0
    for _ in range(20):
        flapping.attached("w", now)
        now += 300.0
        flapping.lost("w", now)
        assert flapping.quarantined_s("w", now) == 0.0


def test_short_lives_count_with_long_ones_between_them() -> None:
    flapping = WorkerTrust(CoordinatorState(lambda: 0.0))
    for begin, end in ((0.0, 10.0), (10.0, 100.0), (100.0, 110.0)):
        flapping.attached("w", begin)
        flapping.lost("w", end)
    assert flapping.quarantined_s("w", 110.0) == 5.0


def test_a_life_goes_on_until_its_end_is_reported() -> None:
    flapping = WorkerTrust(CoordinatorState(lambda: 0.0))
    for begin in (0.0, 50.0):
        flapping.attached("w", begin)
    flapping.lost("w", 70.0)
    flapping.attached("w", 71.0)
    flapping.lost("w", 72.0)
    assert flapping.quarantined_s("w", 72.0) == 0.0
    flapping.attached("w", 73.0)
    flapping.left("w")
    flapping.attached("w", 200.0)
    flapping.lost("w", 210.0)
    assert flapping.quarantined_s("w", 210.0) == 5.0


def lose_part(flapping: WorkerTrust, part: int, of: int, now: float) -> list[float]:
    """How long each of the workers is quarantined after so many of them were lost within a second and a half."""
    names = [f"w{number}" for number in range(of)]
    for name in names:
        flapping.attached(name, now - 10.0)
    for number, name in enumerate(names[:part]):
        flapping.lost(name, now + 1.5 * number / part)
    return [flapping.quarantined_s(name, now + 1.5) for name in names]


@pytest.mark.parametrize(("part", "of"), [(3, 3), (3, 6), (50, 100), (100, 100)])
def test_what_takes_a_large_part_of_the_fleet_at_once_is_held_against_nobody(part: int, of: int) -> None:
    flapping = WorkerTrust(CoordinatorState(lambda: 0.0))
    for blip in range(5):
        assert lose_part(flapping, part, of, 30.0 * blip) == [0.0] * of


@pytest.mark.parametrize(("part", "of"), [(1, 1), (2, 2), (3, 7), (49, 100)])
def test_a_small_part_may_be_at_fault(part: int, of: int) -> None:
    flapping = WorkerTrust(CoordinatorState(lambda: 0.0))
    lose_part(flapping, part, of, 0.0)
    quarantined = lose_part(flapping, part, of, 30.0)
    assert all(quarantined[:part])
    assert not any(quarantined[part:])


def test_what_takes_all_takes_back_no_strike_of_before() -> None:
    flapping = WorkerTrust(CoordinatorState(lambda: 0.0))
    for _ in range(3):
        flapping.lost("w0", 0.0)
    lose_part(flapping, 4, 4, 8.0)
    assert flapping.quarantined_s("w0", 8.0) == 2.0


def test_those_forgiven_are_forgotten() -> None:
    flapping = WorkerTrust(CoordinatorState(lambda: 0.0))
    for number in range(1000):
        flapping.lost(f"host-{number}", 10.0 * number)
    assert len(flapping._records) <= 60
