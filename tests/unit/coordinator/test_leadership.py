"""When a coordinator that waits takes over, and when one that leads has to doubt that it does."""

from ebbtide.coordinator.election import (
    LOOK_S,
    RENEW_S,
    STEADY_S,
    TTL_S,
    LeaderTenure,
    StandbyWatch,
)


def looks(watch: StandbyWatch, begin: float, end: float, *, held: bool) -> list[float]:
    """When it would have taken over, looking as often as it should."""
    times = [begin + number * LOOK_S for number in range(round((end - begin) / LOOK_S))]
    return [now for now in times if watch.free(now, held=held)]


def test_a_lease_that_is_held_is_never_taken() -> None:
    assert looks(StandbyWatch(), 0.0, 100.0, held=True) == []


def test_a_lease_that_ends_under_its_eyes_is_taken_at_once() -> None:
    watch = StandbyWatch()
    looks(watch, 0.0, 10.0, held=True)
    assert watch.free(10.0, held=False)


def test_one_that_has_just_come_gives_a_leader_the_time_to_renew() -> None:
    first = looks(StandbyWatch(), 50.0, 60.0, held=False)[0]
    assert 2 * RENEW_S <= first - 50.0 <= STEADY_S + LOOK_S


def test_a_lease_that_ended_while_the_store_was_away_is_not_taken_at_once() -> None:
    watch = StandbyWatch()
    looks(watch, 0.0, 10.0, held=True)
    assert not watch.free(20.0, held=False)  # neither could reach it: its holder lives, perhaps
    assert not watch.free(20.0 + LOOK_S, held=False)
    assert looks(watch, 20.0 + 2 * LOOK_S, 30.0, held=False)


def test_one_that_slept_looks_twice() -> None:
    watch = StandbyWatch()
    looks(watch, 0.0, 10.0, held=True)
    assert not watch.free(15.0, held=False)


def test_a_leader_is_certain_for_no_longer_than_its_lease_lasts() -> None:
    tenure = LeaderTenure(10.0)
    assert tenure.rest_s(10.0) == TTL_S
    assert tenure.rest_s(10.0 + TTL_S) == tenure.rest_s(99.0) == 0.0
    tenure.renewed = 12.0
    assert tenure.rest_s(12.0 + TTL_S / 2) == TTL_S / 2


def test_a_renewal_is_waited_for_until_it_would_be_too_late() -> None:
    tenure = LeaderTenure(10.0)
    assert tenure.patience_s(10.5) == TTL_S - 0.5
    assert tenure.patience_s(99.0) == RENEW_S


def test_a_takeover_is_over_in_less_than_half_of_what_is_promised() -> None:
    assert TTL_S + LOOK_S <= 2.5
    assert STEADY_S <= TTL_S
