"""Estimates how alike the lengths of a group's samples are: the share of the variance that a group has in common.

It is the most likely share (`shared_part` has the model), with the stopped samples counted as longer than what they
made. A sum of squares alone would take a group whose long samples were stopped for a group of alike ones.
"""

from collections.abc import Sequence
from math import log, sqrt
from typing import Final, TypeVar

from msgspec import Struct

from ebbtide.scheduling.long_tail.shared_part import SharedPrior, shared_part

T = TypeVar("T")
#: The share lies between these: equal lengths of a group cannot be told from nearly equal ones.
_LEAST, _MOST = 0.02, 0.98
#: Steps of the search: each leaves 0.618 of the range, so the share is found within 0.004.
_SEARCHED: Final = 12
_GOLDEN: Final = 0.618_033_988_749_895
#: Groups with stopped samples cost a grid each, so only some of them count.
_STOPPED_GROUPS: Final = 64


class ScoredGroup(Struct, frozen=True, gc=False):
    """The scores of a group's samples."""

    ended: Sequence[float]
    stopped: Sequence[float] = ()


def group_share(groups: Sequence[ScoredGroup]) -> float:
    """The share of the variance that a group has in common. Without groups of two samples it is one half."""
    told = [group for group in groups if len(group.ended) + len(group.stopped) > 1]
    whole = [_sums(group.ended) for group in told if not group.stopped]
    cut = evenly([group for group in told if group.stopped], _STOPPED_GROUPS)
    low, high = _LEAST, _MOST
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = _likelihood(left, whole, cut), _likelihood(right, whole, cut)
    for _ in range(_SEARCHED):
        if at_left > at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = _likelihood(left, whole, cut)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = _likelihood(right, whole, cut)
    return 0.5 * (low + high)


def evenly(items: Sequence[T], most: int) -> Sequence[T]:
    """So many items at most, from all parts of the sequence alike."""
    count = len(items)
    return items if count <= most else [items[at * count // most] for at in range(most)]


def _likelihood(share: float, whole: Sequence[tuple[int, float, float]], cut: Sequence[ScoredGroup]) -> float:
    """The logarithm of the likelihood, with a prior that has its mode at one half and weighs as two samples."""
    prior, within = SharedPrior(0.0, share), sqrt(1.0 - share)
    found = log(share) + log(1.0 - share)
    found += sum(_normal(share, *sums) for sums in whole)
    for group in cut:
        found += _normal(share, *_sums(group.ended)) if group.ended else 0.0
        found += shared_part(prior, within, group.ended, group.stopped).log_evidence
    return found


def _sums(scores: Sequence[float]) -> tuple[int, float, float]:
    return len(scores), sum(scores), sum(score * score for score in scores)


def _normal(share: float, count: int, total: float, squares: float) -> float:
    """The logarithm of the density of scores with the same correlation between any two, but for a constant."""
    within, mean = 1.0 - share, total * total / count
    between = within + count * share
    return -0.5 * ((count - 1) * log(within) + log(between) + (squares - mean) / within + mean / between)
