"""Slack tells until when rollouts may go on beside served requests."""

from math import inf

import pytest

from ebbtide.serving_guard.governor.costs import UnloadedLatency
from ebbtide.serving_guard.governor.served_requests import ServedRequest, SlackBook

_PREFILL_S = 0.0001  # a token
_DECODE_S = 0.01


def book() -> SlackBook:
    unloaded = UnloadedLatency()
    for number in range(100):
        prompt = 100 + 100 * (number % 10)
        unloaded.began(prompt, _PREFILL_S * prompt)
        unloaded.decoded(1 + number % 3, _DECODE_S)
    return SlackBook(unloaded)


def arrive(one: SlackBook, *names: str, at: float = 0.0, prompt: int = 1000) -> None:
    for name in names:
        one.arrive(name, ServedRequest(arrived=at, prompt_tokens=prompt))


def test_nothing_inside_leaves_all_time() -> None:
    assert book().point(1.0, 0.1, 0.2) == inf


def test_without_an_aim_there_is_no_slack() -> None:
    one = book()
    arrive(one, "a")
    assert one.point(0.0, 0.1, 0.2) == -inf
    one.produce("a", 0.1, 1, 0.0)
    assert one.point(0.0, 0.1, 0.2) > 0.1
    assert one.point(0.0, 0.0, 0.2) == -inf


def test_one_that_waits_needs_its_prefill_before_its_deadline() -> None:
    one = book()
    arrive(one, "a", at=5.0)
    assert one.point(1.0, 0.1, 0.2) == pytest.approx(5.0 + 1.0 - 0.1, rel=1e-6)


def test_a_queue_needs_the_prefill_of_all_ahead() -> None:
    one = book()
    arrive(one, "a", "b", "c", at=5.0)
    assert one.point(1.0, 0.1, 0.2) == pytest.approx(5.0 + 1.0 - 0.3, rel=1e-6)
    one.end("a")
    assert one.point(1.0, 0.1, 0.2) == pytest.approx(5.0 + 1.0 - 0.2, rel=1e-6)


def test_those_that_decode_make_tokens_between_the_prefills_of_those_that_wait() -> None:
    one = book()
    arrive(one, "a")
    one.produce("a", 0.1, 1, 0.0)
    arrive(one, "b", at=5.0)
    assert one.point(1.0, 9.0, 9.0) == pytest.approx(5.0 + 1.0 - 0.1 - _DECODE_S, rel=1e-6)


def test_the_pause_after_a_token_and_the_mean_both_stay_within_their_aims() -> None:
    one = book()
    arrive(one, "a")
    one.produce("a", 1.0, 1, 0.0)
    assert one.point(1.0, 0.05, 0.08) == pytest.approx(1.0 + 0.05 - _DECODE_S)
    one.produce("a", 1.01, 1, 0.0)  # what it was ahead of its mean it may lose
    assert one.point(1.0, 0.05, 0.08) == pytest.approx(1.01 + 0.08 - _DECODE_S)
    one.produce("a", 1.30, 1, 0.0)  # and one that is behind its mean may lose nothing
    assert one.point(1.0, 0.05, 0.08) < 1.30


def test_the_least_slack_of_all_counts() -> None:
    one = book()
    arrive(one, "a", "b")
    one.produce("a", 1.0, 1, 0.0)
    one.produce("b", 1.02, 1, 0.0)
    assert one.point(1.0, 0.05, 0.08) == pytest.approx(1.0 + 0.05 - _DECODE_S)
    one.end("a")
    assert one.point(1.0, 0.05, 0.08) == pytest.approx(1.02 + 0.05 - _DECODE_S)


def test_other_aims_hold_at_once_for_those_inside() -> None:
    one = book()
    arrive(one, "a")
    one.produce("a", 1.0, 1, 0.0)
    for aim in (0.05, 0.2, 0.03):
        assert one.point(1.0, aim, 0.5) == pytest.approx(1.0 + aim - _DECODE_S)


def test_one_that_is_not_inside_changes_nothing() -> None:
    one = book()
    assert one.produce("a", 1.0, 1, 0.0) is None
    assert one.end("a") is None
    assert one.last("a") is None
    assert len(one) == 0
