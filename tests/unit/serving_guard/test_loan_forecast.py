"""Borrowers learn how long a trainer's device stays as it is, from earlier steps or from its owner."""

import pytest

from ebbtide.serving_guard.device_ownership import LoanForecast


def taught(steps: int = 5, lent_s: float = 30.0, held_s: float = 10.0) -> tuple[LoanForecast, float]:
    """A forecast after some equal steps, and when the device was lent again."""
    forecast, now = LoanForecast(), 0.0
    for _ in range(steps):
        forecast.turn(now, lent=True)
        forecast.turn(now + lent_s, lent=False)
        now += lent_s + held_s
    forecast.turn(now, lent=True)
    return forecast, now


def test_equal_steps_are_expected_to_go_on() -> None:
    forecast, now = taught()
    assert forecast.forecast(now).spell_s == pytest.approx(30.0)
    assert forecast.forecast(now + 12.0).spell_s == pytest.approx(18.0)
    forecast.turn(now + 30.0, lent=False)
    assert forecast.forecast(now + 34.0).spell_s == pytest.approx(6.0)


def test_a_spell_longer_than_all_before_is_expected_to_last_as_long_again() -> None:
    forecast, now = taught()
    assert forecast.forecast(now + 50.0).spell_s == pytest.approx(50.0)


def test_the_owner_knows_better_until_its_time_is_over() -> None:
    forecast, now = taught()
    forecast.turn(now + 30.0, lent=False, spell_s=100.0)
    assert forecast.forecast(now + 40.0).spell_s == pytest.approx(90.0)
    assert forecast.forecast(now + 140.0).spell_s == pytest.approx(110.0)


def test_the_share_is_that_of_the_next_minute() -> None:
    forecast, now = taught()
    assert forecast.forecast(now).share == pytest.approx(0.5 + 0.5 * 0.75)
    forecast.turn(now + 30.0, lent=False, spell_s=600.0)
    assert forecast.forecast(now + 31.0).share == 0.0
    fresh = LoanForecast()
    fresh.turn(0.0, lent=True)
    assert fresh.forecast(0.0).share == 1.0


def test_a_wish_that_is_repeated_begins_no_spell() -> None:
    forecast, now = taught()
    forecast.turn(now + 20.0, lent=True)
    assert forecast.forecast(now + 20.0).spell_s == pytest.approx(10.0)
