"""Where a group stands in the queue."""

from ebbtide.coordinator.rules.rollout_queue import GroupPlaces


def test_rollouts_that_come_later_have_their_groups_place() -> None:
    places = GroupPlaces()
    assert [places.of("a", 1), places.of("b", 2), places.of("a", 3), places.of("b", 4)] == [1, 2, 1, 2]


def test_a_group_of_which_nothing_is_open_begins_anew() -> None:
    places = GroupPlaces()
    places.of("a", 1)
    places.of("b", 2)
    places.forget(1)
    places.forget(7)  # known to nobody
    assert [places.of("a", 5), places.of("b", 6)] == [5, 2]


def test_of_too_many_groups_those_stay_that_were_asked_for_last() -> None:
    places = GroupPlaces(memory=2)
    for number, group in enumerate("abac"):
        places.of(group, number)
    assert [places.of("a", 9), places.of("b", 9)] == [0, 9]
    assert [places.of("c", 8)] == [8]  # "b" came in its place
