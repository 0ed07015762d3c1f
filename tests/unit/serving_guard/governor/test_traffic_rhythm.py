"""Served traffic is forecast from its idle and busy spells."""

import pytest

from ebbtide.serving_guard.governor.traffic_rhythm import IdleShare, IdleSpells, TrafficRhythm


def alternating(idle_s: float, busy_s: float, count: int) -> tuple[TrafficRhythm, float]:
    """It ends with the start of an idle spell."""
    rhythm, now = TrafficRhythm(0.01), 0.0
    rhythm.turn(now, busy=False)
    for _ in range(count):
        now += idle_s
        rhythm.turn(now, busy=True)
        now += busy_s
        rhythm.turn(now, busy=False)
    return rhythm, now


def test_what_is_left_of_a_spell_follows_from_those_that_lasted_longer() -> None:
    spells = IdleSpells()
    for _ in range(90):
        spells.ended(0.1)
    for _ in range(10):
        spells.ended(100.0)
    assert spells.left(0.0) == pytest.approx(10.1, rel=0.1)
    assert spells.left(1.0) == pytest.approx(95.0, rel=0.1)


def test_a_spell_longer_than_all_before_is_expected_to_last_as_long_again() -> None:
    spells = IdleSpells()
    for _ in range(20):
        spells.ended(1.0)
    assert spells.left(300.0) == pytest.approx(300.0)
    assert IdleSpells().left(60.0) == pytest.approx(60.0)


def test_shares_are_of_the_last_minute_or_so() -> None:
    share = IdleShare()
    assert share.share(0.0) == 0.0
    share.turn(0.0, True)
    assert share.share(10.0) == pytest.approx(1.0)
    share.turn(100.0, False)
    assert 0.2 < share.share(160.0) < 0.5
    assert share.share(1000.0) < 0.01


def test_load_is_the_share_of_time_with_a_request_inside() -> None:
    rhythm, now = alternating(0.3, 0.1, 2000)
    assert rhythm.load(now) == pytest.approx(0.25, abs=0.01)


def test_an_idle_spell_of_minutes_pays_for_a_long_wake_up_and_short_ones_do_not() -> None:
    busy, now = alternating(0.05, 1.0, 500)
    assert not busy.pays(now, 5.0)
    assert busy.pays(now, 0.1)
    assert busy.pays(now + 120.0, 5.0)
    assert not TrafficRhythm(0.01).pays(0.0, 1.0)


def test_a_long_spell_forecasts_the_next_minute_and_short_ones_what_the_last_had() -> None:
    calm, now = alternating(600.0, 1.0, 10)
    assert calm.forecast(now + 5.0).share > 0.9
    busy, now = alternating(0.1, 0.9, 1000)
    busy.grant(0.0, False)
    assert busy.forecast(now).share < 0.2
    assert busy.forecast(now).spell_s == pytest.approx(0.1, rel=0.5)


def test_disturbance_is_the_part_of_the_allowed_misses_that_rollouts_caused() -> None:
    rhythm = TrafficRhythm(0.01)
    assert rhythm.forecast(0.0).disturbance == 0.0
    for number in range(20_000):
        rhythm.served(0.02 * number, missed=number % 200 == 199)
    assert rhythm.forecast(400.0).disturbance == pytest.approx(0.5, rel=0.05)


def test_a_miss_or_two_among_few_requests_use_no_budget_up() -> None:
    rhythm = TrafficRhythm(0.01)
    for number in range(10):
        rhythm.served(60.0 * number, missed=number in {2, 7})
        assert rhythm.forecast(60.0 * number).disturbance < 1.0


def test_a_row_of_misses_among_few_requests_does() -> None:
    rhythm = TrafficRhythm(0.01)
    for number in range(10):
        rhythm.served(6.0 * number, missed=number % 2 == 0)
    assert rhythm.forecast(60.0).disturbance > 1.0


def test_disturbance_fades_also_while_no_request_comes() -> None:
    rhythm = TrafficRhythm(0.01)
    for number in range(10):
        rhythm.served(float(number), missed=number % 2 == 0)
    seen = [rhythm.forecast(10.0 + 60.0 * minute).disturbance for minute in range(15)]
    assert seen == sorted(seen, reverse=True)
    assert seen[0] > 1.0
    assert seen[-1] == 0.0


def test_saying_again_what_holds_changes_nothing() -> None:
    rhythm = TrafficRhythm(0.01)
    for now in range(10):
        rhythm.turn(float(now), busy=False)
    assert rhythm.left(10.0) == pytest.approx(10.0)
