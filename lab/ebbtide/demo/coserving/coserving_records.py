"""Records a replay beside rollouts: each served request, and the budget and use of the rollouts.

All times are seconds of CLOCK_MONOTONIC, which all processes of a host share.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

from msgspec import Struct

#: The SLO's percentile of latencies.
PERCENTILE: Final = 0.99


class ServedAnswer(Struct, frozen=True, kw_only=True):
    """A request as its client saw it."""

    due: float  # by the plan
    sent: float = 0.0
    first: float = 0.0  # when its first token came; 0: never
    last: float = 0.0
    prompt: int  # tokens
    output: int  # tokens
    failed: str = ""  # reason

    @property
    def ttft_s(self) -> float:
        return self.first - self.sent

    @property
    def tpot_s(self) -> float:
        """Mean time of each token after the first; 0 if there is none."""
        return (self.last - self.first) / (self.output - 1) if self.output > 1 else 0.0


class BudgetMoment(Struct, frozen=True, kw_only=True):
    """The rollouts' budget and use at one time."""

    at_s: float
    tokens: int = 0  # budget of the next step
    sequences: int = 0  # most sequences of the next step
    generated: int = 0  # tokens since the engine's start
    busy_s: float = 0.0  # time in which steps ran since the engine's start
    steps: int = 0  # since the engine's start
    training: bool = False  # the trainer ran


class TimeStretch(Struct, frozen=True):
    """A part of the replay, such as the one in which serving was alone."""

    name: str
    begin_s: float
    end_s: float
    others: float = 0.0  # share of the cores that foreign programs took


class ReplayRecord(Struct, frozen=True, kw_only=True):
    title: str
    answers: tuple[ServedAnswer, ...]
    moments: tuple[BudgetMoment, ...] = ()
    stretches: tuple[TimeStretch, ...] = ()
    ttft_s: float = 0.0  # target; 0: none
    tpot_s: float = 0.0  # target; 0: none


def within(answers: Iterable[ServedAnswer], begin_s: float, end_s: float) -> list[ServedAnswer]:
    """Selects the requests that were sent in this time."""
    return [one for one in answers if begin_s <= one.sent < end_s]


def percentile(values: Sequence[float], share: float = PERCENTILE) -> float:
    """Returns the least of `values` that a `share` of them does not exceed; 0 without values."""
    if not values:
        return 0.0
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def ttfts(answers: Iterable[ServedAnswer]) -> list[float]:
    """TTFTs of complete answers."""
    return [one.ttft_s for one in answers if not one.failed]


def tpots(answers: Iterable[ServedAnswer]) -> list[float]:
    """TPOTs of complete answers with several tokens."""
    return [one.tpot_s for one in answers if not one.failed and one.output > 1]


def attained(values: Sequence[float], target: float) -> float:
    """Share of `values` within the target; 1 without values."""
    return sum(value <= target for value in values) / len(values) if values else 1.0


def inside(answers: Iterable[ServedAnswer]) -> list[tuple[float, int]]:
    """Returns (time, requests under way from then on), in order, without failed ones, whose end is unknown."""
    whole = [one for one in answers if not one.failed]
    changes = sorted([(one.sent, 1) for one in whole] + [(one.last, -1) for one in whole])
    count, found = 0, []
    for at, change in changes:
        count += change
        found.append((at, count))
    return found


def idle_s(answers: Sequence[ServedAnswer], begin_s: float, end_s: float) -> float:
    """Seconds between the two times in which no request was under way."""
    steps = [(begin_s, 0), *inside(answers), (end_s, 0)]
    spells = ((max(begin_s, a), min(end_s, b)) for (a, count), (b, _) in pairwise(steps) if count == 0)
    return sum(max(0.0, b - a) for a, b in spells)
