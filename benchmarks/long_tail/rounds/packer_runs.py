"""Simulates RollPacker's settings under veRL, under its own rule of rounds and under Ebbtide's.

Three models with caps of 8k, 16k and 32k tokens, on 16, 32 and 64 H800, with 128 prompts of 8 samples. Engines, lengths
and what no paper states are those of `benchmarks/simulator/published/rollpacker_points.py`, fitted to its table of
rollout times. The step's other time, for rewards and training, is the published step of veRL less its rollout, under
every rule. With it the race comes near its published gain. If it grew with the trained tokens, the race would gain
more than published, since it trains on shorter responses.
"""

from collections.abc import Mapping
from statistics import fmean
from typing import Final, NamedTuple

import msgspec
from msgspec import Struct

from benchmarks.rivals.rollpacker_policy import RollPackerPolicy
from benchmarks.simulator.published.paper_hardware import published_engine
from benchmarks.simulator.published.paper_setting import PaperProfiles, PaperTimes, co_located, simulated
from benchmarks.simulator.published.rollpacker_points import RollPackerPaper
from ebbtide.simulator.engines.engine_profile import EngineProfile
from ebbtide.simulator.engines.known_hardware import H800, QWEN25_7B, QWEN25_14B, QWEN25_32B
from ebbtide.simulator.engines.roofline import ModelShape
from ebbtide.simulator.outcome import Outcome, StepOutcome
from ebbtide.simulator.scenario.quantity_spec import MATH_RESPONSES, LengthSpec, QuantitySpec
from ebbtide.simulator.scenario.training_run import TrainingRun
from ebbtide.simulator.world.ebbtide_policy import EbbtidePolicy
from ebbtide.simulator.world.policy import Policy
from ebbtide.simulator.world.verl_policy import VerlPolicy

PROMPTS, GROUP = 128, 8
#: As in the points that this reuses.
_MEMORY_SHARE, _SEQUENCES, _PROMPT_TOKENS = 0.85, 2048, 256
#: Steps by which a prompt may be late under Ebbtide's rule: RollPacker's queue keeps prompts for as long.
MAX_AGE: Final = 4
#: Steps from one long round of RollPacker's to the next.
PERIOD: Final = 5


class PackerSetting(NamedTuple):
    """`rollout_s`: of veRL, published; `step_s`: of RollPacker's short and long round; `whole`: its speed over veRL in
    all; `batching`: by tail batching alone.
    """

    name: str
    model: ModelShape
    gpus: int  # of an engine
    engines: int
    cap: int
    rollout_s: float
    step_s: tuple[float, float]
    whole: float
    batching: float

    @property
    def other_s(self) -> float:
        """A step of veRL without its rollout: five steps of RollPacker are four short ones and a long one."""
        short, long = self.step_s
        return self.whole * (4.0 * short + long) / 5.0 - self.rollout_s


SETTINGS: Final = (
    PackerSetting("7B/8k", QWEN25_7B, 1, 16, 8_192, 82.0, (106.0, 129.0), 2.03, 1.30),
    PackerSetting("14B/16k", QWEN25_14B, 2, 16, 16_384, 277.0, (134.0, 302.0), 2.22, 1.48),
    PackerSetting("32B/32k", QWEN25_32B, 2, 32, 32_768, 673.0, (261.0, 771.0), 2.56, 2.21),
)


class RoundsRun(Struct, frozen=True, kw_only=True):
    """What one rule came to with one seed."""

    batches_per_hour: float
    rollout_s: float  # of a step
    longest_over_shortest: float  # of the rollouts of a period of five steps
    generated: int  # tokens
    kept: int  # of responses that ended


def policy_of_rule(rule: str, excess: float) -> Policy:
    if rule == "verl":
        return VerlPolicy()
    if rule == "race":
        return RollPackerPolicy()
    return EbbtidePolicy(rounds_of_steps="whole_groups" if rule == "whole_groups" else "off", rounds_excess=excess)


def played(setting: PackerSetting, rule: str, *, steps: int, seed: int, excess: float = 1.25) -> RoundsRun:
    """One rule in one setting. The first period, in which rounds fill their queue, is left out."""
    unstated = {one.name: one.value for one in RollPackerPaper().unstated}
    engine = _engine(setting, unstated["layer_ms"])
    run = TrainingRun(
        name="packed",
        trainer="paper",
        steps=steps,
        prompts=PROMPTS,
        group=GROUP,
        cap=setting.cap,
        max_staleness=MAX_AGE if rule == "whole_groups" else 0,
        prompt_tokens=QuantitySpec(value=_PROMPT_TOKENS),
        lengths=_lengths(unstated),
    )
    profiles = PaperProfiles([engine], PaperTimes(update=setting.other_s))
    fleet = [co_located(engine, setting.engines, run.name)]
    return _told(simulated(fleet, run, policy_of_rule(rule, excess), profiles, seed=seed))


def _told(outcome: Outcome) -> RoundsRun:
    first, rest = outcome.steps[PERIOD - 1], outcome.steps[PERIOD:]
    return RoundsRun(
        batches_per_hour=3600.0 * len(rest) / (rest[-1].trained_s - first.trained_s),
        rollout_s=fmean(map(_rollout_s, rest)),
        longest_over_shortest=max(map(_rollout_s, rest)) / min(map(_rollout_s, rest)),
        generated=outcome.tokens.generated,
        kept=outcome.tokens.kept,
    )


def _rollout_s(step: StepOutcome) -> float:
    return step.generated_s - step.opened_s


def _engine(setting: PackerSetting, layer_ms: float) -> EngineProfile:
    layer_s = layer_ms / 1e3
    return published_engine(
        setting.model, H800, setting.gpus, layer_s=layer_s, sequences=_SEQUENCES, memory_share=_MEMORY_SHARE
    )


def _lengths(unstated: Mapping[str, float]) -> LengthSpec:
    return msgspec.structs.replace(
        MATH_RESPONSES, **{name: unstated[name] for name in ("stretch", "correlation", "endless")}
    )
