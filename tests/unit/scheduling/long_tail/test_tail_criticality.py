"""How much each running sample decides when a step ends."""

from itertools import pairwise
from random import Random

import pytest

from ebbtide.scheduling.long_tail.drafts.tail_criticality import ExpectedEnd, last_shares, tail_worths


def test_of_samples_that_are_alike_each_is_last_with_the_same_probability() -> None:
    assert last_shares([ExpectedEnd(10, 20, 40)] * 5) == pytest.approx([0.2] * 5)


def test_one_that_surely_ends_before_another_is_never_last() -> None:
    shares = last_shares([ExpectedEnd(1, 2, 3), ExpectedEnd(100, 200, 300), ExpectedEnd(100, 200, 300)])
    assert shares == pytest.approx([0.0, 0.5, 0.5])


def test_shares_are_those_of_drawn_ends() -> None:
    ends, draw = [ExpectedEnd(10, 20, 40), ExpectedEnd(15, 18, 22), ExpectedEnd(1, 25, 30)], Random(1)
    counts = [0] * 3
    for _ in range(20_000):
        drawn = [_drawn(one, draw.random()) for one in ends]
        counts[drawn.index(max(drawn))] += 1
    assert last_shares(ends) == pytest.approx([one / 20_000 for one in counts], abs=0.02)


def test_ends_that_are_certain_are_compared_too() -> None:
    assert last_shares([ExpectedEnd(5, 5, 5), ExpectedEnd(7, 7, 7)]) == pytest.approx([0.0, 1.0])
    assert last_shares([ExpectedEnd(0, 0, 0)] * 2) == pytest.approx([0.5, 0.5])
    assert last_shares([]) == []


def test_while_others_wait_all_tokens_are_worth_the_same() -> None:
    ends = [ExpectedEnd(1, 2, 3), ExpectedEnd(100, 200, 300)]
    assert tail_worths(ends, 0.0) == [1.0, 1.0]
    first, last = tail_worths(ends, 0.8)
    assert 0.0 < first < 0.3
    assert last > 1.7


def _drawn(one: ExpectedEnd, share: float) -> float:
    latest = one.ninth + 2 * (one.ninth - one.half)
    knots = [(0.0, 0.0), (0.1, one.tenth), (0.5, one.half), (0.9, one.ninth), (1.0, latest)]
    for (low, begin), (high, end) in pairwise(knots):
        if share <= high:
            return begin + (end - begin) * (share - low) / (high - low)
    return latest
