"""A worker changes to another architecture only where that gains more than it costs."""

import pytest

from ebbtide.scheduling.changing import Prospect, gain_s, settled, stay_s, worth


def prospect(**changes: float) -> Prospect:
    return Prospect(**{"change_s": 30.0, "stay_s": 120.0, "work_s": 600.0, **changes})  # type: ignore[arg-type]


def test_much_work_that_nobody_does_is_worth_a_change() -> None:
    assert worth(prospect())


def test_less_work_than_the_way_there_and_back_costs_is_not() -> None:
    assert not worth(prospect(work_s=59.0))
    assert worth(prospect(work_s=61.0))


def test_a_short_stay_is_not_worth_a_change_however_much_waits() -> None:
    assert not worth(prospect(stay_s=50.0))


def test_a_little_work_is_worth_a_change_once_it_has_waited_long() -> None:
    assert not worth(prospect(work_s=1.0, waited_s=58.0))
    assert worth(prospect(work_s=1.0, waited_s=60.0))


def test_nothing_to_do_is_never_worth_a_change_however_long_it_lasts() -> None:
    assert not worth(prospect(work_s=0.0, waited_s=1e6))
    assert not worth(prospect(work_s=0.0, busy=False))


def test_an_idle_worker_changes_for_any_work_that_nobody_does() -> None:
    assert worth(prospect(work_s=0.1, busy=False))


def test_work_that_others_will_have_done_by_then_is_none() -> None:
    assert gain_s(prospect(work_s=60.0, servers=2)) == 0.0
    assert not worth(prospect(work_s=60.0, servers=2, busy=False))
    assert gain_s(prospect(work_s=150.0, servers=2)) == pytest.approx(30.0)


def test_who_changed_just_now_stays_for_a_multiple_of_what_it_took_while_it_is_busy() -> None:
    assert not settled(119.0, 30.0, busy=True)
    assert settled(121.0, 30.0, busy=True)
    assert settled(0.0, 30.0, busy=False)


def test_a_worker_that_others_wait_for_stays_for_a_slice_or_until_the_change_has_paid() -> None:
    assert stay_s(10.0, 30.0, shared=True) == 120.0
    assert stay_s(10.0, 1.0, shared=True) == 10.0
    assert stay_s(10.0, 30.0, shared=False) == float("inf")
