"""Groups of which responses ended, and which are not complete."""

from ebbtide.coordinator.state.run_episodes import EndedResponses


def test_a_group_has_the_episodes_whose_responses_ended_until_they_are_over() -> None:
    responses = EndedResponses()
    responses.ended("e1", 7)
    responses.ended("e2", 7)
    responses.ended("e3", 9)
    assert responses.by_group == {7: {"e1", "e2"}, 9: {"e3"}}
    assert responses.forget("e1") == 7
    assert responses.forget("e3") == 9
    assert responses.by_group == {7: {"e2"}}


def test_a_later_turn_takes_the_place_of_the_one_before() -> None:
    responses = EndedResponses()
    responses.ended("e", 7)
    responses.ended("e", 7)
    assert responses.by_group == {7: {"e"}}
    assert responses.forget("e") == 7
    assert responses.forget("e") is None
    assert responses.by_group == {}


def test_of_too_many_the_newest_are_remembered() -> None:
    responses = EndedResponses(memory=2)
    for number in range(4):
        responses.ended(f"e{number}", number)
    assert responses.by_group == {2: {"e2"}, 3: {"e3"}}
