"""Measures rules of rounds in RollPacker's settings: trained batches per hour over veRL's, simulated.

`race` is RollPacker's own rule by itself, without its other parts. `whole_groups` is Ebbtide's, which loses no
response. `of_published` is each one's gain over the published gain of tail batching alone.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from statistics import fmean
from typing import Any, Final

import msgspec
from msgspec import Struct

from benchmarks.long_tail.rounds.packer_runs import PERIOD, SETTINGS, RoundsRun, played

#: By name in the report: the rule, and how many prompts are on their way for each that a step trains on.
RULES: Final[dict[str, tuple[str, float]]] = {
    "verl": ("verl", 1.0),
    "race": ("race", 1.25),
    "whole_groups 1.25": ("whole_groups", 1.25),
    "whole_groups 1.5": ("whole_groups", 1.5),
    "whole_groups": ("whole_groups", 2.0),
}
#: A period fills the queue, and so many are measured.
_PERIODS, _QUICK_PERIODS = 6, 3
SEEDS, QUICK_SEEDS = (0, 1, 2), (0,)


class RuleGain(Struct, frozen=True, kw_only=True):
    """Means over seeds."""

    setting: str
    rule: str
    over_verl: float
    over_verl_by_seed: list[float]
    of_published: float
    rollout_s: float
    longest_over_shortest: float
    made_over_kept: float  # tokens


def rounds_part(tell: Callable[[str], None], *, quick: bool, jobs: int) -> dict[str, Any]:
    """All rules in all settings. `jobs`: processes at a time."""
    seeds = QUICK_SEEDS if quick else SEEDS
    steps = PERIOD * (1 + (_QUICK_PERIODS if quick else _PERIODS))
    keys = [(setting, rule) for setting in range(len(SETTINGS)) for rule in RULES]
    with ProcessPoolExecutor(jobs) as pool:
        tasks = {key: [pool.submit(_run, *key, steps, seed) for seed in seeds] for key in keys}
        found = {key: [task.result() for task in running] for key, running in tasks.items()}
    gains = [_gain(*key, found[key], found[key[0], "verl"]) for key in keys]
    for one in gains:
        tell(
            f"{one.setting:8} {one.rule:18} {one.over_verl:.3f}x veRL, {one.of_published:.3f} of published, "
            f"rollout {one.rollout_s:.0f} s, tokens made over kept {one.made_over_kept:.2f}"
        )
    return {"rounds": msgspec.to_builtins(gains), "figures": {}}


def _run(setting: int, rule: str, steps: int, seed: int) -> RoundsRun:
    name, excess = RULES[rule]
    return played(SETTINGS[setting], name, steps=steps, seed=seed, excess=excess)


def _gain(setting: int, rule: str, runs: Sequence[RoundsRun], verl: Sequence[RoundsRun]) -> RuleGain:
    gains = [one.batches_per_hour / other.batches_per_hour for one, other in zip(runs, verl, strict=True)]
    return RuleGain(
        setting=SETTINGS[setting].name,
        rule=rule,
        over_verl=fmean(gains),
        over_verl_by_seed=gains,
        of_published=fmean(gains) / SETTINGS[setting].batching,
        rollout_s=fmean(one.rollout_s for one in runs),
        longest_over_shortest=fmean(one.longest_over_shortest for one in runs),
        made_over_kept=fmean(one.generated / one.kept for one in runs),
    )
