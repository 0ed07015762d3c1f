"""RollPacker (NSDI'26): rollout times by over-provisioning, and times of short and long rounds.

Its rollout times take 8,192, 16,384 and 32,768 steps where a response runs into the cap. They are 10, 17 and 21 ms for
a step, in proportion to the layers of the models and not to their weights: steps are bound by launching kernels.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import ceil
from statistics import median
from typing import Final, NamedTuple

import msgspec

from benchmarks.rivals.rollpacker_policy import RollPackerPolicy
from benchmarks.simulator.published.paper_hardware import published_engine
from benchmarks.simulator.published.paper_setting import PaperProfiles, PaperTimes, co_located, simulated
from benchmarks.simulator.published.published_point import Paper, PublishedPoint, UnstatedValue, Use
from ebbtide.simulator.engines.roofline import H800, QWEN25_7B, QWEN25_14B, QWEN25_32B, ModelShape
from ebbtide.simulator.outcome import StepOutcome
from ebbtide.simulator.scenario.quantity_spec import MATH_RESPONSES, QuantitySpec
from ebbtide.simulator.scenario.training_run import TrainingRun

#: Cap -> model, devices of an engine, engines (16, 32 and 64 H800 in all).
_SETTINGS: Final[dict[int, tuple[ModelShape, int, int]]] = {
    8192: (QWEN25_7B, 1, 16),
    16_384: (QWEN25_14B, 2, 16),
    32_768: (QWEN25_32B, 2, 32),
}
_PROMPTS, _GROUP = 128, 8
#: Rollout seconds by excess of prompts and of responses, in the order of the caps.
_TABLE: Final[dict[tuple[float, float], tuple[float, float, float]]] = {
    (1.0, 1.0): (82, 277, 673),
    (1.0, 1.125): (77, 260, 658),
    (1.0, 1.25): (71, 232, 655),
    (1.0, 1.5): (54, 115, 265),
    (1.125, 1.0): (77, 244, 636),
    (1.25, 1.0): (72, 169, 259),
    (1.5, 1.0): (60, 143, 279),
    (1.25, 1.25): (47, 88, 170),
}
#: One point in three of the table is fitted: no excess, and a quarter of either.
_FITTED: Final = {(1.0, 1.0), (1.0, 1.25), (1.25, 1.0)}
#: The public code runs so many rollouts of each setting without training (`examples/sensitive_analysis_fig11`), and its
#: figure shows the longest short round and the longest long one, weighted by how often each comes
#: (`plot/plt_sensitive_squeezer.py`).
_ITERATIONS: Final = 10
#: The figure shows one run. The median of so many stands for it: whether a few endless responses meet in one prompt
#: decides about the longest round, so runs differ by a factor and a mean is like none of them.
_SEEDS: Final = (0, 1, 2)
#: Of memory and sequences, by the same folder's configuration.
_MEMORY_SHARE, _SEQUENCES = 0.85, 2048
_STEP_TIMES: Final = {8192: (106, 129), 16_384: (134, 302), 32_768: (261, 771)}
_REASON: Final = (
    "the step's time holds rewards, judges and training, whose times are not published; the rollout phases are judged"
)


class _PackerUnstated(NamedTuple):
    layer_ms: float
    stretch: float
    correlation: float
    endless: float


def _key(cap: int, excess: tuple[float, float]) -> str:
    return f"{cap >> 10}k {excess[0]:g} {excess[1]:g}"


def _points() -> list[PublishedPoint]:
    points = []
    for excess, row in _TABLE.items():
        for cap, value in zip(_SETTINGS, row, strict=True):
            points.append(
                PublishedPoint(
                    key=_key(cap, excess),
                    where="table of over-provisioning",
                    what=f"rollout, {cap >> 10}k: {excess[0]:g} x prompts, {excess[1]:g} x responses (s)",
                    value=value,
                    use=Use.FITTED if excess in _FITTED else Use.JUDGED,
                )
            )
    for cap, times in _STEP_TIMES.items():
        for kind, value in zip(("short", "long"), times, strict=True):
            points.append(
                PublishedPoint(
                    key=f"{cap >> 10}k {kind}",
                    where="section 6, step times",
                    what=f"{kind} round's step, {cap >> 10}k (s)",
                    value=value,
                    use=Use.LEFT_OUT,
                    reason=_REASON,
                )
            )
    return points


class RollPackerPaper(Paper):
    name = "RollPacker"
    unstated: Sequence[UnstatedValue] = (
        UnstatedValue(
            name="layer_ms", value=0.3, low=0.26, high=0.36, what="launching a layer's kernels in an engine (ms)"
        ),
        UnstatedValue(
            name="stretch", value=1.05, low=0.7, high=1.6, what="lengths, as a multiple of the mathematical ones"
        ),
        UnstatedValue(name="correlation", value=0.07, low=0.0, high=0.7, what="of lengths within a prompt"),
        UnstatedValue(name="endless", value=0.016, low=0.0, high=0.03, what="share of responses that run into any cap"),
    )
    points: Sequence[PublishedPoint] = tuple(_points())

    def simulated(self, unstated: Mapping[str, float], keys: frozenset[str] | None = None) -> dict[str, float]:
        return {
            _key(cap, excess): _rollout_s(cap, excess, unstated)
            for excess in _TABLE
            for cap in _SETTINGS
            if keys is None or _key(cap, excess) in keys
        }


def _rollout_s(cap: int, excess: tuple[float, float], unstated: Mapping[str, float]) -> float:
    """The longest short round and the longest long one, weighted by their numbers in a period."""
    return median(_period_s(cap, excess, _PackerUnstated(**unstated), seed) for seed in _SEEDS)


@lru_cache(maxsize=4096)
def _period_s(cap: int, excess: tuple[float, float], unstated: _PackerUnstated, seed: int) -> float:
    model, gpus, engines = _SETTINGS[cap]
    engine = published_engine(
        model, H800, gpus, layer_s=unstated.layer_ms / 1e3, sequences=_SEQUENCES, memory_share=_MEMORY_SHARE
    )
    deferred = ceil(_PROMPTS * excess[0]) - _PROMPTS
    short = _PROMPTS // deferred if deferred else _ITERATIONS
    period = short + 1 if deferred else _ITERATIONS
    run = TrainingRun(
        name="mixed",
        trainer="paper",
        steps=_ITERATIONS // period * period,
        prompts=_PROMPTS,
        group=_GROUP,
        cap=cap,
        prompt_tokens=QuantitySpec(value=256),
        lengths=msgspec.structs.replace(
            MATH_RESPONSES, stretch=unstated.stretch, correlation=unstated.correlation, endless=unstated.endless
        ),
    )
    policy = RollPackerPolicy(prompt_excess=excess[0], response_excess=excess[1])
    fleet, profiles = [co_located(engine, engines, run.name)], PaperProfiles([engine], PaperTimes())
    phases = [_phase_s(step) for step in simulated(fleet, run, policy, profiles, seed=seed).steps]
    shorts = max(phase for at, phase in enumerate(phases) if at % period < short)
    if not deferred:
        return shorts
    return (short * shorts + max(phases[short::period])) / period


def _phase_s(step: StepOutcome) -> float:
    return step.generated_s - step.opened_s
