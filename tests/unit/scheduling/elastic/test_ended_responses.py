"""Lengths of responses whose groups are not complete."""

from ebbtide.scheduling.elastic.ended_responses import EndedResponses


def test_a_group_has_the_responses_that_ended_in_it_until_their_episodes_are_over() -> None:
    responses = EndedResponses()
    responses.ended("e1", 7, 100)
    responses.ended("e2", 7, 200)
    responses.ended("e3", 9, 300)
    assert responses.by_group == {7: {"e1": 100, "e2": 200}, 9: {"e3": 300}}
    responses.forget("e1")
    responses.forget("e3")
    assert responses.by_group == {7: {"e2": 200}}


def test_a_later_turn_takes_the_place_of_the_one_before() -> None:
    responses = EndedResponses()
    responses.ended("e", 7, 100)
    responses.ended("e", 7, 50)
    assert responses.by_group == {7: {"e": 50}}
    responses.forget("e")
    responses.forget("e")
    assert responses.by_group == {}


def test_of_too_many_the_newest_are_remembered() -> None:
    responses = EndedResponses(memory=2)
    for number in range(4):
        responses.ended(f"e{number}", number, 10)
    assert responses.by_group == {2: {"e2": 10}, 3: {"e3": 10}}
