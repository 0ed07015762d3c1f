"""Sizes a fleet by AstraFlow's scaling law (arXiv 2605.15565; code of July 2026, by notes on it).

With G rollout devices and w the share of the time in which the trainer waits for a batch:

    w > 0.10: G / (1 - w), rounded up      w < 0.05: at most G used/accepted 1.1, rounded up      else G

The law is applied to short simulations until it holds, which costs nothing here: to the rival's advantage.
"""

from functools import lru_cache
from math import ceil
from typing import Final

from benchmarks.elastic.elastic_setting import RUN, ElasticCase, Fleet, simulation
from ebbtide.simulator.outcome import Outcome
from ebbtide.simulator.world.elastic_policy import ElasticPolicy

_WAITS: Final = 0.10
_RESTS: Final = 0.05
_SPARE: Final = 1.10
#: The law is asked at most so often, each time after so many steps, as its sizes settle within three.
_ROUNDS: Final = 4
_STEPS: Final = 6
#: Devices of an engine.
_DEVICES: Final = 2


def scaled(devices: int, waits: float, used: float) -> int:
    """The law's number of devices. `waits`: w; `used`: samples that were trained on, of those that were accepted."""
    if waits > _WAITS:
        return ceil(devices / (1.0 - min(waits, 0.99)))
    if waits < _RESTS:
        return min(devices, ceil(devices * used * _SPARE))
    return devices


@lru_cache(maxsize=64)
def settled_engines(case: ElasticCase, first: int, max_staleness: int) -> int:
    """Engines of two devices at which the law holds, begun with `first`. All accepted samples are trained on."""
    engines = first
    for _ in range(_ROUNDS):
        fleet = Fleet(lends=False, spot=False, reserved=engines, max_staleness=max_staleness)
        short = case._replace(steps=_STEPS)
        outcome = simulation(short, ElasticPolicy(plans=False), fleet).run(lambda _: None)
        wanted = max(1, ceil(scaled(_DEVICES * engines, waiting_share(outcome), 1.0) / _DEVICES))
        if wanted == engines:
            break
        engines = wanted
    return engines


def waiting_share(outcome: Outcome) -> float:
    """The trainer's share of the time without training, from the end of the first step on."""
    begin_s, end_s = outcome.steps[0].trained_s, outcome.steps[-1].trained_s
    busy_s = sum(
        min(span.end_s, end_s) - max(span.begin_s, begin_s)
        for span in outcome.spans
        if span.machine == f"{RUN} trainer" and span.state == "training" and begin_s < span.end_s
    )
    return max(0.0, 1.0 - busy_s / max(1e-9, end_s - begin_s))
