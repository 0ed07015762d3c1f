"""Lengths of groups, drawn by a Gaussian copula over a log-normal with a heavier tail."""

from collections.abc import Sequence
from math import exp, sqrt
from random import Random

from ebbtide.coordinator.forecasts.length_learner import EndedGroup, LengthCurve, LengthLearner, UnfinishedGroup

CAP = 16_384


def response(shared: float, draw: Random, alike: float) -> int:
    """One length. `shared`: the group's part, a standard normal value; `alike`: its share of the variance."""
    score = sqrt(alike) * shared + sqrt(1.0 - alike) * draw.gauss()
    return max(1, min(CAP, round(660.0 * exp(0.78 * score + 0.95 * max(0.0, score - 1.05)))))


def drawn(draw: Random, groups: int, *, size: int = 8, alike: float = 0.6) -> list[list[int]]:
    found = []
    for _ in range(groups):
        shared = draw.gauss()
        found.append([response(shared, draw, alike) for _ in range(size)])
    return found


def ended(lengths: list[int], prompt: str = "") -> EndedGroup:
    return EndedGroup(
        lengths=[one for one in lengths if one < CAP], stopped=[one for one in lengths if one >= CAP], prompt=prompt
    )


def taught(draw: Random, *, groups: int = 512, size: int = 8, alike: float = 0.6) -> LengthLearner:
    learner = LengthLearner()
    learner.groups_ended(ended(lengths) for lengths in drawn(draw, groups, size=size, alike=alike))
    return learner


def open_at(lengths: list[int], made: int) -> UnfinishedGroup:
    """A group whose samples began together, once each running one has made so many tokens."""
    return UnfinishedGroup(
        finished=[one for one in lengths if one <= made and one < CAP],
        made=[made for one in lengths if one > made],
        cap=CAP,
    )


def known_lengths(lengths: Sequence[int]) -> LengthCurve:
    """What a learner knows of a run with these lengths, groups aside."""
    size, learner = -(-len(lengths) // 512), LengthLearner()
    learner.groups_ended(EndedGroup(lengths=lengths[at : at + size]) for at in range(0, len(lengths), size))
    return learner.curve
