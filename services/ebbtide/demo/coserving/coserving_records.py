"""What a replay beside rollouts leaves behind: each served request, and what the rollouts might take and took.

All times are seconds of CLOCK_MONOTONIC, which all processes of a host share.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

from msgspec import Struct

#: Of latencies: the SLO's percentile, unless another is asked for.
PERCENTILE: Final = 0.99


class ServedAnswer(Struct, frozen=True, kw_only=True):
    """A request as its client saw it: `due` by the plan, `sent`, its first and last tokens come (0: never), and why it
    failed. `prompt` and `output` count tokens."""

    due: float
    sent: float = 0.0
    first: float = 0.0
    last: float = 0.0
    prompt: int
    output: int
    failed: str = ""

    @property
    def ttft_s(self) -> float:
        return self.first - self.sent

    @property
    def tpot_s(self) -> float:
        """Mean time of each token behind the first; 0 where there is none."""
        return (self.last - self.first) / (self.output - 1) if self.output > 1 else 0.0


class BudgetMoment(Struct, frozen=True, kw_only=True):
    """What the rollouts' next step might take at `at_s` (`tokens`, in at most `sequences`), and sums since the engine's
    start: `generated` tokens, `busy_s` in which steps ran. `training`: whether the trainer ran."""

    at_s: float
    tokens: int = 0
    sequences: int = 0
    generated: int = 0
    busy_s: float = 0.0
    training: bool = False


class TimeStretch(Struct, frozen=True):
    """A part of the replay, such as the one in which serving was alone. `others`: what programs that have no part in it
    took of the cores, as a share."""

    name: str
    begin_s: float
    end_s: float
    others: float = 0.0


class ReplayRecord(Struct, frozen=True, kw_only=True):
    """`ttft_s` and `tpot_s` are the targets; 0: none."""

    title: str
    answers: tuple[ServedAnswer, ...]
    moments: tuple[BudgetMoment, ...] = ()
    stretches: tuple[TimeStretch, ...] = ()
    ttft_s: float = 0.0
    tpot_s: float = 0.0


def within(answers: Iterable[ServedAnswer], begin_s: float, end_s: float) -> list[ServedAnswer]:
    """Those that were sent then."""
    return [one for one in answers if begin_s <= one.sent < end_s]


def percentile(values: Sequence[float], share: float = PERCENTILE) -> float:
    """The least of `values` that a `share` of them does not exceed; 0 without any."""
    if not values:
        return 0.0
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def ttfts(answers: Iterable[ServedAnswer]) -> list[float]:
    """Of those that came whole."""
    return [one.ttft_s for one in answers if not one.failed]


def tpots(answers: Iterable[ServedAnswer]) -> list[float]:
    """Of those that came whole, with several tokens."""
    return [one.tpot_s for one in answers if not one.failed and one.output > 1]


def attained(values: Sequence[float], target: float) -> float:
    """Share of `values` within the target; 1 without any."""
    return sum(value <= target for value in values) / len(values) if values else 1.0


def inside(answers: Iterable[ServedAnswer]) -> list[tuple[float, int]]:
    """(time, requests under way from then on), in order. A request that failed is not counted: nobody knows until when
    it was there."""
    whole = [one for one in answers if not one.failed]
    changes = sorted([(one.sent, 1) for one in whole] + [(one.last, -1) for one in whole])
    count, found = 0, []
    for at, change in changes:
        count += change
        found.append((at, count))
    return found


def idle_s(answers: Sequence[ServedAnswer], begin_s: float, end_s: float) -> float:
    """Seconds between the two in which no request was under way."""
    steps = [(begin_s, 0), *inside(answers), (end_s, 0)]
    spells = ((max(begin_s, a), min(end_s, b)) for (a, count), (b, _) in pairwise(steps) if count == 0)
    return sum(max(0.0, b - a) for a, b in spells)
