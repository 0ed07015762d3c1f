"""Texts that are too long."""

from ebbtide.coordinator.rules.placement import dead_letter_message
from ebbtide.types.ids import MAX_EVENT_BYTES, shortened


def test_a_text_that_fits_is_left_alone() -> None:
    assert shortened("\u20ac" * 10, 30) == "\u20ac" * 10
    assert shortened("", 10) == ""


def test_a_text_that_is_too_long_is_cut_between_characters() -> None:
    assert shortened("\u20ac" * 11, 30) == "\u20ac" * 8 + " ..."
    assert len(shortened("a" * 2000)) == 1024


def test_the_evidence_of_a_dead_letter_fits_into_an_event() -> None:
    message = dead_letter_message(99, "attempt on w1 at token 0: \u20ac; " * 9999, limit=5)
    assert message is not None
    assert len(message.encode()) < MAX_EVENT_BYTES
