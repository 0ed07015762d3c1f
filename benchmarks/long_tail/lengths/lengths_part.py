"""Counts how often forecast intervals of lengths cover the truth, on groups that taught nothing.

Steps of groups teach a learner. Of a further step it is asked, at several moments, for an interval that each open
sample's length lies in with a probability of 80 %. Most samples have not ended at the first moments. The figure is the
coverage that is farthest from 80 %, over all settings: marginal, correlation, size of groups and number of slots.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, Final

import msgspec
from msgspec import Struct

from benchmarks.long_tail.lengths.length_marginals import NamedMarginal, known_marginals, marginal_named
from benchmarks.long_tail.lengths.played_lengths import held_back
from ebbtide.coordinator.forecasts.length_learner import EndedGroup, LengthLearner

#: Intervals are between these quantiles.
_LOW, _HIGH = 0.1, 0.9
CORRELATIONS: Final = (0.2, 0.6, 0.9)
SIZES: Final = (4, 8, 16)
#: Samples for each slot: at one all of a step's samples run at once.
LOADS: Final = (1, 12)
#: Shares of the samples that have ended when the learner is asked.
MOMENTS: Final = (0.0, 0.3, 0.6, 0.9)
#: Groups of a step, and steps that teach: the learner remembers no more.
_GROUPS, _TAUGHT = 128, 4
#: Steps that are held back in each setting, for a coverage within about a hundredth.
STEPS, QUICK_STEPS = 40, 10


class LengthSetting(Struct, frozen=True, kw_only=True):
    marginal: str
    correlation: float | None  # of the logarithms of lengths, within a group; None: of recorded ones it is not known
    size: int  # of a group
    load: int  # samples for each slot


class Coverage(Struct, frozen=True, kw_only=True):
    """`covered`: share of the true lengths within their intervals."""

    setting: LengthSetting
    asked: int
    covered: float
    by_moment: dict[str, float]
    alike: float  # the share that the samples of a group have in common, as learnt


def lengths_part(
    tell: Callable[[str], None],
    *,
    quick: bool,
    jobs: int,
    only: Sequence[str] = (),
    recorded: Sequence[Coverage] = (),
    folder: Path | None = None,
) -> dict[str, Any]:
    """Coverage in all settings. `only`: names of marginals; `recorded`: what counts beside them; `folder`: of recorded
    marginals."""
    settings = length_settings(only, SIZES, LOADS, folder)
    steps = QUICK_STEPS if quick else STEPS
    found = list(recorded)
    for one in recorded:
        tell(_line(one))
    with ProcessPoolExecutor(jobs) as pool:
        under_way = [pool.submit(coverage, setting, steps, folder) for setting in settings]
        for run in as_completed(under_way):
            found.append(run.result())
            tell(_line(found[-1]))
    farthest = max(found, key=lambda one: abs(one.covered - (_HIGH - _LOW)))
    return {
        "figures": {"interval_coverage": farthest.covered},
        "mean_coverage": fmean(one.covered for one in found),
        "held_back_steps": steps,
        "settings": msgspec.to_builtins(sorted(found, key=lambda one: str(one.setting))),
    }


def length_settings(
    only: Sequence[str], sizes: Sequence[int], loads: Sequence[int], folder: Path | None = None
) -> list[LengthSetting]:
    """Every setting of the known marginals. `only`: names of marginals, all if empty; `folder`: of recorded ones."""
    return [
        LengthSetting(marginal=one.name, correlation=correlation, size=size, load=load)
        for one in known_marginals(folder)
        if not only or one.name in only
        for correlation in CORRELATIONS
        for size in sizes
        for load in loads
    ]


def coverage(setting: LengthSetting, steps: int, folder: Path | None = None) -> Coverage:
    """How often intervals cover the truth in one setting. A learner is taught anew for every step."""
    marginal = marginal_named(setting.marginal, folder)
    draw = Random(f"lengths {setting}")
    hits: dict[float, list[bool]] = {moment: [] for moment in MOMENTS}
    alike = list[float]()
    for _ in range(steps):
        learner = taught(marginal, draw, setting)
        alike.append(learner.intraclass_correlation)
        groups = marginal.groups(draw, _GROUPS, setting.size, setting.correlation or 0.0)
        for moment in MOMENTS:
            hits[moment] += covered(learner, draw, groups, _slots(setting), moment, marginal.cap)
    every = [hit for found in hits.values() for hit in found]
    return Coverage(
        setting=setting,
        asked=len(every),
        covered=fmean(every),
        by_moment={str(moment): fmean(found) for moment, found in hits.items() if found},
        alike=fmean(alike),
    )


def taught(marginal: NamedMarginal, draw: Random, setting: LengthSetting) -> LengthLearner:
    """A learner that knows some steps."""
    learner = LengthLearner()
    groups = marginal.groups(draw, _TAUGHT * _GROUPS, setting.size, setting.correlation or 0.0)
    learner.groups_ended(ended_groups(groups, marginal.cap))
    return learner


def ended_groups(groups: Iterable[Sequence[int]], cap: int) -> list[EndedGroup]:
    """What a learner is told of whole groups: responses at the cap did not end by themselves."""
    return [
        EndedGroup(lengths=[one for one in group if one < cap], stopped=[one for one in group if one >= cap])
        for group in groups
    ]


def covered(
    learner: LengthLearner, draw: Random, groups: Sequence[Sequence[int]], slots: int, moment: float, cap: int
) -> list[bool]:
    """Of one open sample of each open group."""
    found = list[bool]()
    for group, truth in held_back(groups, slots, moment, cap):
        forecast, at = learner.forecast(group), draw.randrange(len(truth))
        low, high = (forecast.length(group.made[at], share) for share in (_LOW, _HIGH))
        found.append(low <= truth[at] <= high)
    return found


def _slots(setting: LengthSetting) -> int:
    return max(1, _GROUPS * setting.size // setting.load)


def _line(one: Coverage) -> str:
    setting = one.setting
    return (
        f"lengths: {setting.marginal:40} correlation {setting.correlation}, groups of {setting.size:2}, "
        f"{setting.load:2} samples a slot: {one.covered:.3f} of {one.asked}"
    )
