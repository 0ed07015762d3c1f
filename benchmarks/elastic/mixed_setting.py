"""Builds simulations of pools in which some engines are three times as fast as the others.

The fast engines are pairs of H100; the slow ones take three times as long for everything. Lengths are those that
`benchmarks/simulator/published` has fitted to RLBoost's points (arXiv 2510.19225). Steps are trained in no time worth
mentioning: only generation is compared.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from benchmarks.simulator.published.paper_setting import FLUSH_S, PaperProfiles, PaperTimes
from benchmarks.simulator.published.rlboost_points import RLBoostPaper
from benchmarks.simulator.published.rlboost_runs import CAP
from ebbtide.coordinator.settings import CoordinatorSettings
from ebbtide.simulator.engines.engine_profile import EngineProfile, StepCosts
from ebbtide.simulator.engines.roofline import H100, QWEN3_14B, QWEN3_32B, roofline_engine
from ebbtide.simulator.scenario.machine_pool import MachinePool
from ebbtide.simulator.scenario.quantity_spec import LengthSpec, QuantitySpec
from ebbtide.simulator.scenario.scenario import Scenario
from ebbtide.simulator.scenario.training_run import TrainingRun
from ebbtide.simulator.world.simulation import Policy, Simulation

RUN: Final = "grpo"
FAST, SLOW = "fast", "slow"
#: How often slow engines take a fast one's time.
_SLOWER: Final = 3.0
_SHAPES: Final = {"14b": QWEN3_14B, "32b": QWEN3_32B}
_PROMPTS, _GROUP, PROMPT_TOKENS = 64, 8, 256
#: Seconds: an optimiser's step, a lost machine's replacement, its boot.
_UPDATE_S, _REPLACED_S, _BOOT_S = 1.0, 60.0, 30.0
_HEARTBEAT_S: Final = 1.0
#: Tokens of prompts differ little from run to run, and neither do these of RLBoost's setting.
_UNSTATED: Final = {one.name: one.value for one in RLBoostPaper.unstated}


class MixedCase(NamedTuple):
    """One pool, and the work on it."""

    name: str
    model: str = "14b"
    fast: int = 3  # engines
    slow: int = 3
    slots: int = 1024
    lost: str = ""  # the engines of which some are lost: "fast", "slow" or none
    losses_per_hour: float = 6.0  # of each of those
    small: bool = False  # slow engines have a third of the fast ones' memory, too
    named: bool = True  # engines name their devices
    steps: int = 4
    seed: int = 0


def cases(steps: int, seeds: Sequence[int]) -> list[MixedCase]:
    """All settings with each seed."""
    settings = [
        MixedCase("half"),
        MixedCase("one fast", fast=1, slow=5),
        MixedCase("few slots", slots=24),
        MixedCase("small memory", small=True),
        MixedCase("fast ones lost", lost=FAST),
        MixedCase("slow ones lost", lost=SLOW),
        MixedCase("devices unnamed", named=False),
        MixedCase("32b half", model="32b"),
        MixedCase("32b one fast", model="32b", fast=1, slow=5, small=True),
    ]
    return [one._replace(steps=steps, seed=seed) for one in settings for seed in seeds]


def engines(case: MixedCase) -> dict[str, EngineProfile]:
    """The profiles of both pools."""
    fast = roofline_engine(_SHAPES[case.model], H100, 2)
    costs = msgspec.structs.asdict(fast.costs)
    slower = {name: _SLOWER * value for name, value in costs.items() if name.endswith("_s")}
    kv = msgspec.structs.replace(fast.kv, tokens=fast.kv.tokens // (3 if case.small else 1))
    slow = msgspec.structs.replace(fast, costs=StepCosts(**(costs | slower)), kv=kv)
    return {
        pool: msgspec.structs.replace(profile, name=pool, device=f"{profile.device} {pool}" if case.named else "")
        for pool, profile in ((FAST, fast), (SLOW, slow))
    }


def scenario(case: MixedCase) -> Scenario:
    spec = LengthSpec(
        mean=_UNSTATED["mean_14b"], median=1.0, sigma=_UNSTATED["sigma"], correlation=_UNSTATED["correlation"]
    )
    run = TrainingRun(
        name=RUN,
        trainer="paper",
        steps=case.steps,
        prompts=_PROMPTS,
        group=_GROUP,
        cap=CAP,
        prompt_tokens=QuantitySpec(value=PROMPT_TOKENS),
        lengths=spec,
    )
    pools = [_pool(case, FAST, case.fast), _pool(case, SLOW, case.slow)]
    return Scenario(name=case.name, fleet=tuple(pools), run=(run,), hours=200.0)


def mixed_simulation(case: MixedCase, policy: Policy) -> Simulation:
    """Build one. The same case has the same work and the same machines under each policy."""
    profiles = PaperProfiles(list(engines(case).values()), PaperTimes(update=_UPDATE_S))
    settings = CoordinatorSettings(heartbeat_s=_HEARTBEAT_S, heartbeat_timeout_s=3 * _HEARTBEAT_S)
    return Simulation(scenario(case), case.seed, policy, profiles, settings)


def _pool(case: MixedCase, name: str, workers: int) -> MachinePool:
    lost = case.lost == name
    return MachinePool(
        name=name,
        kind="spot" if lost else "reserved",
        engine=name,
        workers=workers,
        slots=case.slots,
        boot_s=_BOOT_S if lost else 0.0,
        flush_s=FLUSH_S,
        losses_per_hour=case.losses_per_hour if lost else 0.0,
        replaced_s=_REPLACED_S,
    )
