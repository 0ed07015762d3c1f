"""Says how much a running sample decides when the step ends.

A step ends with its last sample. So a token that a sample makes sooner is worth as much as the probability that this
sample is the last one. While others wait for its place, every token is worth the same: they all bring the queue's end
nearer. `tail_worths` weighs both.
"""

from collections.abc import Sequence
from math import prod
from typing import Final, NamedTuple

#: Times at which the ends are compared: the shares are exact to about a hundredth.
_TIMES: Final = 48
#: They find a time within a thousandth of the latest end.
_HALVED: Final = 10
#: What is never last is still worth a little: forecasts err.
LEAST_WORTH: Final = 0.05


class ExpectedEnd(NamedTuple):
    """Quantiles of when a sample ends, as a time or as tokens to come, if all run equally fast. They rise."""

    tenth: float
    half: float
    ninth: float  # nine in ten end by then


def last_shares(ends: Sequence[ExpectedEnd]) -> list[float]:
    """The probability of each sample that it ends last; they sum up to 1. Ends are taken as independent."""
    if not ends:
        return []
    certain = max(one.tenth for one in ends)
    latest = [_latest(one) for one in ends]
    ahead = [at for at, until in enumerate(latest) if until >= certain]  # others are hardly the last ones
    begin, end = min(ends[at].tenth for at in ahead), max(latest)
    shares = [0.0] * len(ends)
    before = [0.0] * len(ahead)
    for index in range(1, _TIMES + 1):
        time = begin + (end - begin) * index / _TIMES
        now = [_ended(ends[at], time) for at in ahead]
        between = [max(0.5 * (one + other), 1e-12) for one, other in zip(before, now, strict=True)]
        all_ended = prod(between)
        for at, was, has, middle in zip(ahead, before, now, between, strict=True):
            shares[at] += (has - was) * all_ended / middle
        before = now
    total = sum(shares)
    return [share / total for share in shares] if total > 0.0 else [1.0 / len(ends)] * len(ends)


def tail_worths(ends: Sequence[ExpectedEnd], tail: float) -> list[float]:
    """The worth of a token of each sample; 1 on average, but for a least one. `tail`: the share, from 0 to 1, of the
    time until the step's end in which no sample waits.
    """
    return [max(LEAST_WORTH, 1.0 - tail + tail * share * len(ends)) for share in last_shares(ends)]


def last_end(ends: Sequence[ExpectedEnd], share: float) -> float:
    """The time by which all have ended with this probability (0 to 1, both excluded). At least one end is needed."""
    low, high = 0.0, max(_latest(one) for one in ends)
    for _ in range(_HALVED):
        middle = 0.5 * (low + high)
        if prod(_ended(one, middle) for one in ends) < share:
            low = middle
        else:
            high = middle
    return high


def _latest(one: ExpectedEnd) -> float:
    """Where the last tenth of a sample's ends is taken to stop: lengths have long tails."""
    return one.ninth + 2.0 * (one.ninth - one.half)


def _ended(one: ExpectedEnd, time: float) -> float:
    """The probability that a sample has ended by a time: straight lines between the quantiles."""
    if time < one.tenth:
        return 0.1 * time / one.tenth if time > 0.0 else 0.0
    if time < one.half:
        return 0.1 + 0.4 * (time - one.tenth) / (one.half - one.tenth)
    if time < one.ninth:
        return 0.5 + 0.4 * (time - one.half) / (one.ninth - one.half)
    latest = _latest(one)
    return 0.9 + 0.1 * (time - one.ninth) / (latest - one.ninth) if time < latest else 1.0
