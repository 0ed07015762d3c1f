"""A stop string ends a response wherever the text was cut, and no character of it is shown."""

import random

import pytest

from ebbtide.gateway.decode import StopStrings


def pushed(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    watcher, shown = StopStrings(stops), ""
    for piece in pieces:
        text, met = watcher.push(piece)
        shown += text
        if met:
            return shown, met
    return shown + watcher.end(), None


def test_a_stop_string_across_pieces_is_found() -> None:
    assert pushed(["\nUser:"], ["Hello", "\nUs", "er", ": what"]) == ("Hello", "\nUser:")


def test_what_may_become_a_stop_string_is_held_back_and_shown_once_it_cannot() -> None:
    watcher = StopStrings(["abcd"])
    assert watcher.push("xab") == ("x", None)
    assert watcher.push("c") == ("", None)
    assert watcher.push("x") == ("abcx", None)
    assert watcher.push("ab") == ("", None)
    assert watcher.end() == "ab"


def test_without_stop_strings_nothing_is_held_back() -> None:
    assert StopStrings([]).push("anything") == ("anything", None)
    assert StopStrings([""]).push("anything") == ("anything", None)


def test_the_first_that_is_complete_ends_the_text_and_of_two_the_longest() -> None:
    assert pushed(["abcd", "bc"], ["abcd"]) == ("a", "bc")
    assert pushed(["c", "bc"], ["abcd"]) == ("a", "bc")


@pytest.mark.parametrize("seed", range(5))
def test_what_is_found_depends_on_no_split(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(300):
        text = "".join(draw.choice("ab") for _ in range(draw.randint(0, 20)))
        stops = ["".join(draw.choice("ab") for _ in range(draw.randint(1, 5))) for _ in range(draw.randint(1, 3))]
        cuts = sorted(draw.choices(range(len(text) + 1), k=4))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert pushed(stops, pieces) == pushed(stops, list(text)) == pushed(stops, [text])
