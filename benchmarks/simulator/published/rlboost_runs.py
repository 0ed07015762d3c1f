"""Simulates one run of RLBoost's experiments, or of its baseline veRL, and keeps what its points are made of.

What the paper does not state, but its public code does (Terra-Flux/PolyRL: `examples/scripts`, `balance.rs`): 256
sequences at once and 0.6 of the memory in every engine, 16 responses for a micro-batch, four bytes per parameter on the
wire (a log of the authors), tuned windows, and prompts of at most 512 tokens.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Final, NamedTuple, cast

import msgspec
from msgspec import Struct

from benchmarks.rivals.rlboost.rlboost_policy import RLBoostPolicy
from benchmarks.rivals.rlboost.seeding_window import SeedingWindow
from benchmarks.simulator.published.paper_setting import FLUSH_S, PaperProfiles, PaperTimes, co_located, simulated
from ebbtide.simulator.engines.engine_profile import EngineProfile
from ebbtide.simulator.engines.roofline import FITTED, H100, QWEN3_8B, QWEN3_14B, ModelShape, roofline_engine
from ebbtide.simulator.outcome import Outcome
from ebbtide.simulator.scenario.machine_pool import MachinePool
from ebbtide.simulator.scenario.quantity_spec import LengthSpec, QuantitySpec
from ebbtide.simulator.scenario.scenario import PlannedFault
from ebbtide.simulator.scenario.training_run import TrainingRun
from ebbtide.simulator.scenario.workload import curve
from ebbtide.simulator.world.rival_policies import VerlPolicy
from ebbtide.simulator.world.training.step_rounds import Rounds
from ebbtide.simulator.world.training.trainer_loan import LoanWindow
from ebbtide.simulator.world.virtual_coordinator import Decider, VirtualCoordinator

CAP: Final = 14_336
_RUN: Final = "grpo"
_GPUS, _LOCAL, _LINK_GBPS = 2, 4, 50.0
_SEQUENCES, _MEMORY_SHARE = 256, 0.6
_PROMPTS, _GROUP, _PROMPT_TOKENS = 128, 8, 256
#: Windows of the public code for one instance, for two, and so on (seconds), at a cap of 14K.
_WINDOWS: Final[dict[str, tuple[int, ...]]] = {
    QWEN3_8B.name: (190, 160, 105, 70),
    QWEN3_14B.name: (346, 212, 145, 60, 8, 5),
}
#: The policy looks at engines' tokens once a second.
_HEARTBEAT_S: Final = 1.0


class ObservedRLBoost:
    """The policy, with a window that adapts. Tells N_prem of its rule, which a simulation's outcome does not list."""

    def __init__(self, policy: RLBoostPolicy) -> None:
        self._policy = policy
        self._window: SeedingWindow | None = None

    @property
    def stream_batch(self) -> int | None:
        return self._policy.stream_batch

    def decider(self, coordinator: VirtualCoordinator) -> Decider:
        return self._policy.decider(coordinator)

    def rounds(self, run: TrainingRun) -> Rounds:
        return self._policy.rounds(run)

    def window(self, decider: Decider, lent: MachinePool) -> LoanWindow:
        self._window = cast("SeedingWindow", self._policy.window(decider, lent))
        return self._window

    @property
    def helpful(self) -> int:
        """N_prem now; 0 without engines on the trainer's devices."""
        return self._window.helpful if self._window else 0


class BoostUnstated(NamedTuple):
    """What the paper does not state, of one model. Its points say what each is."""

    mean: float
    sigma: float
    correlation: float
    step_ms: float
    sequence_ms: float
    train_us: float
    snapshot_s: float


class BoostedRun(Struct, frozen=True):
    """One simulation. Without instances it is veRL."""

    model: ModelShape
    cap: int
    instances: int
    seeds: bool = True  # the trainer's devices generate, too
    migrates: bool = True
    steps: int = 4
    faults: tuple[PlannedFault, ...] = ()


class RunFigures(NamedTuple):
    steps_s: Sequence[float]  # of each step, from the one before
    tokens: Sequence[int]  # of each step's prompts and responses
    helpful: int  # N_prem at the end


@lru_cache(maxsize=4096)
def run_figures(run: BoostedRun, unstated: BoostUnstated, seed: int) -> RunFigures:
    training = _training(run, unstated)
    local = _engine(run.model, unstated)
    remote = msgspec.structs.replace(local, name=f"{local.name}-remote")
    times = PaperTimes(token=unstated.train_us * 1e-6 * run.model.active / 1e9, snapshot=unstated.snapshot_s)
    profiles = PaperProfiles([local, remote], times, sent_gb=2.0 * run.model.bytes / 1e9)
    if not run.instances:
        outcome = simulated([co_located(local, _LOCAL, _RUN)], training, VerlPolicy(), profiles, seed=seed)
        return _figures(outcome, 0)
    policy = ObservedRLBoost(_policy(run))
    fleet = [_spot(remote, run.instances)]
    if run.seeds:
        fleet.append(co_located(local, _LOCAL, _RUN))
    outcome = simulated(fleet, training, policy, profiles, faults=run.faults, seed=seed, heartbeat_s=_HEARTBEAT_S)
    return _figures(outcome, policy.helpful)


def _figures(outcome: Outcome, helpful: int) -> RunFigures:
    ends = [outcome.steps[0].opened_s, *(step.trained_s for step in outcome.steps)]
    prompts = _PROMPTS * _GROUP * _PROMPT_TOKENS
    return RunFigures(
        steps_s=[later - earlier for earlier, later in pairwise(ends)],
        tokens=[step.tokens + prompts for step in outcome.steps],
        helpful=helpful,
    )


def _engine(model: ModelShape, unstated: BoostUnstated) -> EngineProfile:
    """An engine on two GPUs as vLLM's published steps have it, and what this framework adds to each step."""
    engine = roofline_engine(model, H100, _GPUS, efficiency=FITTED._replace(memory=_MEMORY_SHARE))
    costs = msgspec.structs.replace(
        engine.costs,
        base_s=engine.costs.base_s + unstated.step_ms / 1e3,
        sequence_s=engine.costs.sequence_s + unstated.sequence_ms / 1e3,
    )
    return msgspec.structs.replace(engine, costs=costs, sequences=_SEQUENCES)


def _spot(engine: EngineProfile, instances: int) -> MachinePool:
    return MachinePool(
        name="spot",
        kind="spot",
        engine=engine.name,
        workers=instances,
        slots=1024,
        boot_s=0.0,
        link_gbps=_LINK_GBPS,
        flush_s=FLUSH_S,
    )


def _policy(run: BoostedRun) -> RLBoostPolicy:
    """Windows were tuned for the longer cap and for so many instances; else they adapt from T_init on."""
    tuned = _WINDOWS[run.model.name]
    if run.cap != CAP or run.instances > len(tuned):
        return RLBoostPolicy(migrates=run.migrates)
    windows = " ".join(map(str, tuned))
    return RLBoostPolicy(initial_window_s=tuned[run.instances - 1], windows=windows, migrates=run.migrates)


def _training(run: BoostedRun, unstated: BoostUnstated) -> TrainingRun:
    """The same lengths under each cap: the mean is that under the longer one."""
    spec = LengthSpec(mean=unstated.mean, median=1.0, sigma=unstated.sigma)
    median = curve(spec, {}, CAP)(0.0)
    return TrainingRun(
        name=_RUN,
        trainer="paper",
        steps=run.steps,
        prompts=_PROMPTS,
        group=_GROUP,
        cap=run.cap,
        prompt_tokens=QuantitySpec(value=_PROMPT_TOKENS),
        lengths=LengthSpec(median=median, sigma=unstated.sigma, correlation=unstated.correlation),
    )
