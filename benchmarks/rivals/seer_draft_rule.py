"""Decides lengths of drafts as Seer prints it: splits a budget over two classes (arXiv 2511.14617 v3, Algorithm MBA).

Probes, which run ahead of their groups, are one class, and all other samples the other one. All samples of a class get
drafts of the same length.
"""

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

from msgspec import Struct


class DraftClasses(Struct, frozen=True, kw_only=True, gc=False):
    """What the rule is given. `survival`: probabilities that at least 1, 2, ... draft tokens are accepted, one for each
    token of the longest draft (8 in the paper); `preference`: lambda.
    """

    probes: int
    others: int
    survival: Sequence[float]
    preference: float = 2.0


class ClassDrafts(NamedTuple):
    """Draft tokens of each sample of a class."""

    probes: int
    others: int


def printed_drafts(
    survivals: Sequence[Sequence[float]], probes: Sequence[bool], seconds: Callable[[int], float]
) -> Sequence[int]:
    """The draft tokens of each running sample: one mean acceptance for the budget, one mean survival for the split.
    `probes`: which of them run ahead of their groups; `seconds`: a step's time by the tokens that it verifies.
    """
    samples, ahead = len(survivals), sum(probes)
    mean = [fmean(each) for each in zip(*survivals, strict=True)]
    budget = printed_budget(samples, mean[0], lambda length: seconds(samples * (1 + length)), len(mean))
    split = printed_split(DraftClasses(probes=ahead, others=samples - ahead, survival=mean), budget)
    return [split.probes if probe else split.others for probe in probes]


def printed_split(classes: DraftClasses, budget: int) -> ClassDrafts:
    """Split so many draft tokens. (0, 0): it switches speculation off."""
    if budget < classes.probes:
        return ClassDrafts(0, 0)
    probes, others, left = 1, 0, budget - classes.probes
    while True:
        probe_drop = classes.probes * _drop(classes.survival, probes)
        other_drop = classes.others * _drop(classes.survival, others)
        probe_fits = classes.probes <= left and probes < len(classes.survival)
        other_fits = classes.others <= left and others < len(classes.survival)
        if probe_drop > classes.preference * other_drop and probe_fits:
            probes, left = probes + 1, left - classes.probes
        elif other_fits and classes.others:
            others, left = others + 1, left - classes.others
        else:
            return ClassDrafts(probes, others)


def printed_budget(samples: int, acceptance: float, seconds: Callable[[int], float], longest: int) -> int:
    """The budget that makes a token's time the least, if each draft token is accepted with the same probability.
    `seconds`: a step's time, drafting included, by the draft tokens of each sample.
    """

    def token_s(length: int) -> float:
        tokens = sum(acceptance**place for place in range(length + 1))
        return seconds(length) / tokens

    return samples * min(range(longest + 1), key=token_s)


def _drop(survival: Sequence[float], length: int) -> float:
    """b[g] - b[g + 1], with b[0] = 1. Behind the longest draft nothing is left to lose."""
    if length >= len(survival):
        return 0.0
    return (survival[length - 1] if length else 1.0) - survival[length]
