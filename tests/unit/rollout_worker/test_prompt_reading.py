"""Reads are counted where nothing but reading takes their time."""

import pytest

from ebbtide.rollout_worker.generation.local_attempts import PromptReading


def counts(reading: PromptReading) -> tuple[int, int, object]:
    return reading.reads, reading.tokens, pytest.approx(reading.seconds)


def test_a_read_lasts_from_arrival_to_first_token_and_leaves_out_cached_tokens() -> None:
    reading = PromptReading()
    reading.begin("a", 1.0)
    reading.first_token("a", 100, 40, 1.5)
    assert counts(reading) == (1, 60, 0.5)


def test_reads_side_by_side_share_the_time() -> None:
    reading = PromptReading()
    reading.begin("a", 1.0)
    reading.begin("b", 1.1)
    reading.first_token("a", 100, 0, 2.0)
    reading.first_token("b", 200, 0, 4.0)
    assert counts(reading) == (2, 300, 3.0)


def test_first_tokens_of_one_step_are_one_read() -> None:
    reading = PromptReading()
    for name in "abc":
        reading.begin(name, 1.0)
    for name in "abc":
        reading.first_token(name, 10, 0, 2.0)
    assert counts(reading) == (1, 30, 1.0)


@pytest.mark.parametrize("disturbed", ["held", "abandoned"])
def test_a_disturbed_span_counts_nothing_and_the_next_one_does(disturbed: str) -> None:
    reading = PromptReading()
    for name in "abc":
        reading.begin(name, 1.0)
    if disturbed == "held":
        reading.disturb()
    else:
        reading.abandon("c")
    reading.first_token("a", 100, 0, 5.0)
    assert counts(reading) == (0, 0, 0.0)
    reading.first_token("b", 100, 0, 6.0)
    assert counts(reading) == (1, 100, 1.0)


def test_a_request_that_has_its_tokens_leaves_without_a_trace() -> None:
    reading = PromptReading()
    reading.begin("a", 1.0)
    reading.first_token("a", 100, 0, 2.0)
    reading.abandon("a")
    reading.begin("b", 3.0)
    reading.first_token("b", 50, 50, 3.25)
    assert counts(reading) == (2, 100, 1.25)


def test_while_a_prompt_is_scored_no_read_counts() -> None:
    reading = PromptReading()
    reading.begin("before", 1.0)
    reading.begin("scored", 1.1, scored=True)
    reading.first_token("before", 100, 0, 2.0)
    reading.begin("behind", 2.5)
    reading.first_token("scored", 1_000, 0, 8.0)
    assert counts(reading) == (0, 0, 0.0)
    reading.first_token("behind", 100, 0, 9.0)
    assert counts(reading) == (1, 100, 1.0)


def test_a_scored_prompt_that_is_given_up_spoils_its_span_alone() -> None:
    reading = PromptReading()
    reading.begin("scored", 1.0, scored=True)
    reading.begin("behind", 1.0)
    reading.abandon("scored")
    reading.first_token("behind", 100, 0, 2.0)
    reading.begin("next", 3.0)
    reading.first_token("next", 100, 0, 4.0)
    assert counts(reading) == (1, 100, 1.0)
