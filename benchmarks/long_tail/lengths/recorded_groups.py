"""Reads recorded lengths of groups, and counts how often forecast intervals cover those that taught nothing."""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Annotated, Final

from msgspec import Meta, Struct

from benchmarks.long_tail.lengths.lengths_part import LOADS, MOMENTS, Coverage, LengthSetting, covered, ended_groups
from ebbtide.coordinator.forecasts.length_learner import LengthLearner
from ebbtide.errors import InvalidRequest
from ebbtide.simulator.scenario.input_tables import CsvTable

#: Each fifth of the groups is asked about once the other ones have taught.
_FOLDS: Final = 5
#: With fewer groups no share of one in ten can be told.
_FEWEST: Final = 50
_LONGEST: Final = 10**9


class _Sample(Struct):
    group: str
    sample: str
    output_tokens: Annotated[int, Meta(ge=1, le=_LONGEST)]


def recorded_groups(path: Path) -> list[list[int]]:
    """Lengths by group, of a table `group,sample,output_tokens`. Raises `FileRefused` for a bad table, and
    `InvalidRequest` if it has too few groups.
    """
    groups: dict[str, list[int]] = {}
    for one in CsvTable(path, path.name).rows(_Sample):
        groups.setdefault(one.group, []).append(one.output_tokens)
    if len(groups) < _FEWEST:
        raise InvalidRequest(
            f"{path.name} has {len(groups)} groups; name a file with at least {_FEWEST}", field="lengths"
        )
    return list(groups.values())


def recorded_coverage(name: str, groups: Sequence[Sequence[int]]) -> list[Coverage]:
    """Coverage for few slots and many. The longest length counts as a cap if several responses have it."""
    longest = max(one for group in groups for one in group)
    cap = longest if sum(one == longest for group in groups for one in group) > 1 else 1 << 30
    return [_coverage(name, groups, load, cap) for load in LOADS]


def _coverage(name: str, groups: Sequence[Sequence[int]], load: int, cap: int) -> Coverage:
    draw = Random(f"recorded {name} {load}")
    order = draw.sample(range(len(groups)), len(groups))
    hits: dict[float, list[bool]] = {moment: [] for moment in MOMENTS}
    alike = list[float]()
    for fold in range(_FOLDS):
        asked = [groups[at] for at in order[fold::_FOLDS]]
        learner = LengthLearner()
        learner.groups_ended(ended_groups((groups[at] for n, at in enumerate(order) if n % _FOLDS != fold), cap))
        alike.append(learner.intraclass_correlation)
        slots = max(1, sum(map(len, asked)) // load)
        for moment in MOMENTS:
            hits[moment] += covered(learner, draw, asked, slots, moment, cap)
    every = [hit for found in hits.values() for hit in found]
    size = round(fmean(map(len, groups)))
    return Coverage(
        setting=LengthSetting(marginal=name, correlation=None, size=size, load=load),
        asked=len(every),
        covered=fmean(every),
        by_moment={str(moment): fmean(found) for moment, found in hits.items() if found},
        alike=fmean(alike),
    )
