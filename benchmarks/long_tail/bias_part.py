"""Measures how rules of rounds bias what is trained on, in a toy model of lengths, and what they save.

Two biases: of the mean length of trained responses, against the true mean; and of an estimate of a policy gradient,
with advantages against the group's mean, for a reward that falls with the length. Each is a mean over seeds with its
standard error. `sigmas` is the bias over that. The figure `bias_cured_over_uncured` is the worst share of the race's
bias that Ebbtide's rule leaves, over all settings and both biases.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import sqrt
from statistics import fmean, stdev
from typing import Any, Final

import msgspec
import numpy as np
from msgspec import Struct

from benchmarks.long_tail.toy_rounds import (
    GROUP,
    Floats,
    Rule,
    Trained,
    mean_tokens,
    no_rounds,
    race,
    routed,
    unbiased_slots,
    whole_anew,
    whole_groups,
)

UNCURED: Final = "race"
CURED: Final = "whole_groups"
#: By name: the rule, and whether its responses are weighted for censoring.
RULES: Final[dict[str, tuple[Rule, bool]]] = {
    "no_rounds": (no_rounds, False),
    UNCURED: (race, False),
    "race_weighted": (race, True),
    "unbiased_slots": (unbiased_slots, False),
    "whole_anew": (whole_anew, False),
    "routed": (routed, False),
    CURED: (whole_groups, False),
}
#: Shares of the variance of log lengths that are the prompt's.
SHARED: Final = (0.3, 0.5, 0.7, 0.9)
STEPS: Final = 200
SEEDS, QUICK_SEEDS = 20, 8
#: Classes of length with a weight each. With many more the longest ones have too few responses.
_CLASSES: Final = 200
#: Longer classes, with fewer samples at risk than this, are not estimated one by one: they share what is left.
_AT_RISK: Final = 200


class SeedBias(Struct, frozen=True, kw_only=True):
    """What one seed came to."""

    length: float  # mean trained length over the true one, less 1
    gradient: float  # the estimate over the true gradient, less 1
    effective: float  # sample size as a share of the responses
    duration: float  # of a step, in tokens of one slot
    extra: float  # tokens beyond those of trained responses, as a share of these


class RuleBias(Struct, frozen=True, kw_only=True):
    rule: str
    shared: float
    seeds: int
    length: float
    length_error: float
    gradient: float
    gradient_error: float
    effective: float
    speedup: float  # steps against those without rounds
    extra: float

    @property
    def sigmas(self) -> tuple[float, float]:
        return self.length / self.length_error, self.gradient / self.gradient_error


def bias_part(tell: Callable[[str], None], *, quick: bool) -> dict[str, Any]:
    """All rules in all settings."""
    seeds = QUICK_SEEDS if quick else SEEDS
    rows = [row for shared in SHARED for row in biases(shared, seeds)]
    for row in rows:
        of_length, of_gradient = row.sigmas
        tell(
            f"shared {row.shared:g} {row.rule:15} length {row.length:+.4f} ({of_length:+.1f} sigma)"
            f"  gradient {row.gradient:+.4f} ({of_gradient:+.1f} sigma)  effective {row.effective:.2f}"
            f"  steps {row.speedup:.2f}x  extra tokens {row.extra:.2f}"
        )
    return {
        "bias": [msgspec.to_builtins(row) | {"sigmas": row.sigmas} for row in rows],
        "figures": {"bias_cured_over_uncured": cured_over_uncured(rows)},
    }


def biases(shared: float, seeds: int) -> list[RuleBias]:
    """All rules. Each has draws of its own, so that none is compared with what it was measured on."""
    found = {name: [_of_seed(name, shared, seed) for seed in range(seeds)] for name in RULES}
    plain = fmean(one.duration for one in found["no_rounds"])
    return [_row(name, shared, ones, plain) for name, ones in found.items()]


def cured_over_uncured(rows: Sequence[RuleBias]) -> float:
    """The worst share of the uncured bias that is left."""
    return max(_shares({(row.rule, row.shared): row for row in rows}))


def _shares(rows: Mapping[tuple[str, float], RuleBias]) -> Iterator[float]:
    for shared in {shared for _, shared in rows}:
        cured, uncured = rows[CURED, shared], rows[UNCURED, shared]
        yield abs(cured.length / uncured.length)
        yield abs(cured.gradient / uncured.gradient)


def _row(name: str, shared: float, ones: Sequence[SeedBias], plain: float) -> RuleBias:
    lengths, gradients = [one.length for one in ones], [one.gradient for one in ones]
    root = sqrt(len(ones))
    return RuleBias(
        rule=name,
        shared=shared,
        seeds=len(ones),
        length=fmean(lengths),
        length_error=stdev(lengths) / root,
        gradient=fmean(gradients),
        gradient_error=stdev(gradients) / root,
        effective=fmean(one.effective for one in ones),
        speedup=plain / fmean(one.duration for one in ones),
        extra=fmean(one.extra for one in ones),
    )


def _of_seed(name: str, shared: float, seed: int) -> SeedBias:
    rule, weighted = RULES[name]
    stream = np.random.SeedSequence([seed, list(RULES).index(name), round(100 * shared)])
    steps = rule(np.random.default_rng(stream), shared, STEPS)
    weights = _weights(steps) if weighted else [np.ones_like(one.lengths) for one in steps]
    total, squares = sum(float(one.sum()) for one in weights), sum(float((one**2).sum()) for one in weights)
    kept = sum(float(one.lengths.sum()) for one in steps)
    length = sum(float((one.lengths * weight).sum()) for one, weight in zip(steps, weights, strict=True)) / total
    gradient = sum(_gradient(one, weight) for one, weight in zip(steps, weights, strict=True)) / total
    return SeedBias(
        length=length / mean_tokens() - 1.0,
        gradient=gradient / _true_gradient(shared) - 1.0,
        effective=total**2 / squares / sum(one.lengths.size for one in steps),
        duration=fmean(one.duration for one in steps),
        extra=sum(one.made for one in steps) / kept - 1.0,
    )


def _weights(steps: Sequence[Trained]) -> list[Floats]:
    ended, aborted = (np.concatenate([getattr(one, name) for one in steps]) for name in ("ended", "aborted"))
    return censoring_weights([one.lengths for one in steps], ended, aborted)


def _gradient(step: Trained, weights: Floats) -> float:
    """The sum over responses of advantage times score function. The reward is the score of the length, negative. The
    policy's parameter shifts the part of it that is the response's own, whose score function is `own`.
    """
    rewards = -step.scores
    sums = np.maximum(weights.sum(axis=1, keepdims=True), 1e-12)  # a class may weigh nothing
    means = (rewards * weights).sum(axis=1, keepdims=True) / sums
    return float(((rewards - means) * step.own * weights).sum())


def _true_gradient(shared: float) -> float:
    """Per response. The group's mean has the response's own reward in it, hence the factor (GROUP - 1) / GROUP."""
    return -sqrt(1.0 - shared) * (GROUP - 1) / GROUP


def censoring_weights(kept: Sequence[Floats], ended: Floats, aborted: Floats) -> list[Floats]:
    """A weight for each kept response, of mean 1: the inverse of the share in which lengths like its are kept. `ended`:
    lengths of all that ended in races over fresh prompts; `aborted`: tokens that the others had made.

    The true distribution is estimated from these races by the product limit, with the samples that were aborted at risk
    until then. A race aborts by rank within a prompt, so the estimate's premise, that aborts do not depend on what is
    left, does not hold where lengths of a prompt are alike. The experiment says how much that matters.
    """
    lengths = np.concatenate([one.ravel() for one in kept])
    edges = np.unique(np.quantile(lengths, np.linspace(0.0, 1.0, _CLASSES + 1)[1:-1]))
    ends, aborts, have = (
        np.bincount(np.searchsorted(edges, one), minlength=len(edges) + 1) for one in (ended, aborted, lengths)
    )
    at_risk = (ends + aborts)[::-1].cumsum()[::-1] - 0.5 * aborts  # half of a class's aborts come before its ends
    seen = int(np.argmax(np.append(at_risk < _AT_RISK, True)))
    alive = np.concatenate([[1.0], np.cumprod(1.0 - ends[:seen] / at_risk[:seen])])
    share = np.concatenate([alive[:-1] - alive[1:], alive[-1] * have[seen:] / max(1, have[seen:].sum())])
    weights = share * len(lengths) / np.maximum(have, 1)
    return [weights[np.searchsorted(edges, one)] for one in kept]
