"""Rollouts may delay requests by as much as the slowest recent requests have left, and no more."""

from math import inf
from random import Random

import pytest

from ebbtide.serving_guard.governor.served_requests import AttainmentHeadroom

_TARGET = 1.4


def served(own: list[float], *, allowed: float = 0.01, missed: bool = False) -> AttainmentHeadroom:
    headroom = AttainmentHeadroom(allowed)
    for one in own:
        headroom.served(one, _TARGET, missed=missed)
    return headroom


def test_nothing_known_leaves_nothing() -> None:
    assert served([]).within(_TARGET) == 0.0


def test_requests_far_from_their_target_leave_much() -> None:
    assert served([1.0] * 100).within(_TARGET) == pytest.approx(0.4)


def test_as_many_as_may_miss_do_not_count() -> None:
    assert served([1.0] * 127 + [1.39]).within(_TARGET) == pytest.approx(0.4)
    assert served([1.0] * 126 + [1.38, 1.39]).within(_TARGET) == pytest.approx(0.02)


def test_a_miss_that_no_rollout_caused_says_nothing() -> None:
    assert served([1.0] * 20 + [5.0] * 20).within(_TARGET) == pytest.approx(0.4)
    assert served([5.0] * 20).within(_TARGET) == 0.0


def test_a_miss_that_rollouts_caused_leaves_nothing() -> None:
    headroom = served([1.0] * 20)
    headroom.served(1.45, _TARGET, missed=True)
    assert headroom.within(_TARGET) == 0.0


def test_a_disturbance_is_forgotten() -> None:
    assert served([1.0] * 10 + [1.39] * 50 + [1.0] * 128).within(_TARGET) == pytest.approx(0.4)


@pytest.mark.parametrize("seed", range(20))
def test_few_enough_of_the_last_requests_would_have_missed_by_it(seed: int) -> None:
    random, allowed = Random(seed), 0.05
    own = [random.lognormvariate(0.0, 0.3) for _ in range(128)]
    delay = served(own, allowed=allowed).within(_TARGET)
    assert sum(_TARGET - delay < one - 1e-9 <= _TARGET for one in own) <= allowed * len(own)


def test_without_a_target_nothing_is_near_it() -> None:
    assert served([1.0]).within(inf) == inf
