"""Compares orders of starting in a model of slots that all generate equally fast, whatever runs beside.

Samples run by chunks, and go on in any slot at no cost: the model has no memory and no engines, so it shows the order
alone. The simulator's figures are others. A step's time is in tokens of a slot.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from heapq import heappop, heappush
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, Final

import msgspec
from msgspec import Struct

from benchmarks.long_tail.lengths.length_marginals import marginal_named
from benchmarks.long_tail.lengths.lengths_part import LengthSetting, length_settings, taught
from benchmarks.long_tail.order.live_order import LiveOrder
from benchmarks.long_tail.order.slot_rules import (
    InOrder,
    PublishedSeer,
    RuleMaker,
    SlotSample,
    TrueLengths,
)
from ebbtide.coordinator.forecasts.length_learner import LengthLearner

_GROUPS, _SIZE = 64, 8
#: Samples for each slot: few slots and many.
LOADS: Final = (16, 4)
#: A chunk's share of the mean length: Seer's 8k tokens are about a third of its mean lengths.
_CHUNK: Final = 1 / 3
_SEEDS, _QUICK_SEEDS = 10, 3


class OrderResult(Struct, frozen=True, kw_only=True):
    """Step times over that with true lengths, means over seeds."""

    setting: LengthSetting
    over_true_lengths: dict[str, float]
    bound: float  # total work by slots, or the longest sample


def order_part(
    tell: Callable[[str], None], *, quick: bool, jobs: int, only: Sequence[str] = (), folder: Path | None = None
) -> dict[str, Any]:
    """Step times of all rules over those with true lengths. `live_queue` is the coordinator's: a sample keeps its slot
    until the response's end, as on live workers.
    """
    settings = length_settings(only, (_SIZE,), LOADS, folder)
    with ProcessPoolExecutor(jobs) as pool:
        seeds = _QUICK_SEEDS if quick else _SEEDS
        found = list(pool.map(compared, settings, [seeds] * len(settings), [folder] * len(settings)))
    for one in found:
        rules = ", ".join(f"{name} {ratio:.3f}" for name, ratio in one.over_true_lengths.items())
        setting = one.setting
        tell(f"order: {setting.marginal} {setting.correlation}, {setting.load} samples a slot: {rules}")
    return {"figures": {}, "model": "slots", "settings": msgspec.to_builtins(found)}


def compared(setting: LengthSetting, seeds: int, folder: Path | None = None) -> OrderResult:
    """One setting."""
    marginal = marginal_named(setting.marginal, folder)
    times: dict[str, list[float]] = {}
    bounds = list[float]()
    for seed in range(seeds):
        draw = Random(f"order {setting} {seed}")
        learner = taught(marginal, draw, setting)
        groups = marginal.groups(draw, _GROUPS, setting.size, setting.correlation or 0.0)
        lengths = [length for group in groups for length in group]
        slots = max(1, len(lengths) // setting.load)
        best = step_time(groups, slots, lambda _: TrueLengths())
        for name, make in _rules(learner, marginal.cap).items():
            times.setdefault(name, []).append(step_time(groups, slots, make) / best)
        bounds.append(max(*lengths, sum(lengths) / slots) / best)
    return OrderResult(
        setting=setting, over_true_lengths={name: fmean(found) for name, found in times.items()}, bound=fmean(bounds)
    )


def _rules(learner: LengthLearner, cap: int) -> dict[str, RuleMaker]:
    return {
        "in_order": lambda _: InOrder(),
        "seer": lambda _: PublishedSeer(cap),
        "live_queue": lambda samples: LiveOrder(learner, samples, cap),
    }


def step_time(groups: Sequence[Sequence[int]], slots: int, make: RuleMaker) -> int:
    """When the last sample ends, in tokens."""
    samples = [
        SlotSample(place=at * len(group) + one, group=at, length=length, probe=not one)
        for at, group in enumerate(groups)
        for one, length in enumerate(group)
    ]
    mean = fmean(one.length for one in samples)
    chunk, rule = max(1, round(_CHUNK * mean)), make(samples)
    waiting, running = list(samples), list[tuple[int, int]]()
    now = 0
    while waiting or running:
        while waiting and len(running) < slots:
            one = rule.pick(waiting, now)
            waiting.remove(one)
            one.began = now
            heappush(running, (now + min(chunk, one.length - one.made), one.place))
        now, place = heappop(running)
        one = samples[place]
        one.made, one.began = one.made_by(now), None
        if not one.ended:
            waiting.append(one)
        rule.chunk_over(one, now)
    return now
