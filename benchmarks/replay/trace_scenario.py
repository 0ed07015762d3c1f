"""Makes scenarios of spot traces, response lengths and a setting. The simulator plays them."""

from collections.abc import Sequence
from math import inf
from typing import Final

from msgspec import Struct

from benchmarks.replay.setting import Compared, Setting
from ebbtide.simulator.engines.engine_profile import EngineProfile, KvCapacity, StepCosts
from ebbtide.simulator.scenario.input_tables import InputTables, QuantileTable, SpotTrace
from ebbtide.simulator.scenario.machine_events import MachineChange, machine_events, presences
from ebbtide.simulator.scenario.machine_pool import MachinePool, SpotTraceSpec
from ebbtide.simulator.scenario.quantity_spec import LengthSpec, QuantitySpec
from ebbtide.simulator.scenario.scenario import Scenario
from ebbtide.simulator.scenario.training_run import TrainingRun
from ebbtide.simulator.world.fleet.version_pulls import WeightTerms
from ebbtide.simulator.world.simulation import Profiles
from ebbtide.simulator.world.training.simulated_trainer import TrainingTimes

_POOL: Final = "spot"
_RUN: Final = "run"
#: Of a version, in bytes: a model of 14 billion parameters in bfloat16. The link follows from `Setting.pull_s`.
_DENSE_BYTES: Final = 28_000_000_000
#: A hundredth: later versions are patches, whose pulls are the same for all policies.
_PATCH_BYTES: Final = _DENSE_BYTES // 100
#: The relay and a link without a pull: fast enough that neither counts.
_FASTEST_GBPS: Final = 1e5
_BYTES_PER_GBIT: Final = 125e6
#: More than all sequences of an engine can have: what engines do for want of memory is not compared here.
_MEMORY_TOKENS: Final = 1 << 30


class ReplayCase(Struct, frozen=True, kw_only=True):
    """A window of a trace, and responses. `span_s` of 0 is up to the trace's end."""

    trace: SpotTrace
    lengths: QuantileTable
    stretch: float
    setting: Setting
    start_s: float = 0.0
    span_s: float = 0.0
    share: float = 1.0  # of the trace's machines, drawn by the seed

    @property
    def until_s(self) -> float:
        return min(self.left_s, self.span_s) if self.span_s else self.left_s

    @property
    def left_s(self) -> float:
        """From the window's begin to the trace's end."""
        return max(1.0, self.trace.end_s - self.start_s)


def trace_scenario(case: ReplayCase, compared: Compared) -> Scenario:
    """The scenario in which a policy is played."""
    return Scenario(
        name="replay",
        hours=case.until_s / 3600.0,
        fleet=(_pool(case, delays=compared.delays),),
        run=(_training(case),),
        relay_gbps=_FASTEST_GBPS,
        tables=InputTables(spots={"trace": case.trace}, quantiles={"lengths": case.lengths}),
    )


def _pool(case: ReplayCase, *, delays: bool = True) -> MachinePool:
    setting = case.setting
    link_gbps = _DENSE_BYTES / _BYTES_PER_GBIT / setting.pull_s if setting.pull_s else _FASTEST_GBPS
    return MachinePool(
        name=_POOL,
        kind="spot",
        engine="plateau",
        trace=SpotTraceSpec(
            file="trace", share=case.share, seed=setting.seed, start_s=case.start_s, span_s=case.span_s
        ),
        slots=setting.slots if delays else max(setting.slots, setting.rollouts),
        boot_s=setting.boot_s,
        link_gbps=min(_FASTEST_GBPS, link_gbps),
        speed_spread=setting.spread,
        flush_s=setting.flush_s,
        flush_tokens=setting.flush_tokens,
    )


def _training(case: ReplayCase) -> TrainingRun:
    setting = case.setting
    return TrainingRun(
        name=_RUN,
        trainer="none",
        prompts=setting.rollouts,
        group=1,
        prompt_tokens=QuantitySpec(value=setting.prompt_tokens),
        cap=setting.cap_tokens,
        lengths=LengthSpec(file="lengths", stretch=case.stretch, least=1, correlation=0.0),
    )


def serving_machines(case: ReplayCase) -> list[tuple[float, int]]:
    """How many machines serve from when on: each from the end of its boot and pull until it is gone."""
    pool, setting = _pool(case), case.setting
    changes: list[tuple[float, int]] = []
    for there in presences(pool, {"trace": case.trace}, case.until_s, setting.seed):
        begin_s = there.begin_s + setting.boot_s + setting.pull_s
        if begin_s < there.end_s:
            changes += [(begin_s, 1), (there.end_s, -1)]
    points: dict[float, int] = {}
    number = 0
    for at_s, change in sorted(changes):
        if at_s < inf:
            number += change
            points[at_s] = number
    return list(points.items())


def machine_losses(scenario: Scenario, seed: int) -> dict[str, float]:
    """When each machine that does not stay is lost, by its name."""
    events = (event for pool in scenario.fleet for event in machine_events(scenario, pool, seed))
    return {event.machine: event.at_s for event in events if event.change is MachineChange.GONE}


class PlateauProfiles(Profiles):
    """Engines with a plateau, and a trainer that takes no time."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting

    def engine(self, reference: str) -> EngineProfile:
        del reference
        setting = self._setting
        beyond_s = 1.0 / (setting.rate * setting.plateau)  # of each sequence more
        token_s = 1.0 / setting.prefill_tokens_per_s
        context_s = beyond_s / setting.context_tokens if setting.context_tokens else 0.0
        costs = StepCosts(
            weights_s=1.0 / setting.rate,
            spare=setting.plateau,
            token_s=token_s,
            sequence_s=max(0.0, beyond_s - token_s),
            context_s=context_s,
        )
        return EngineProfile(
            name="plateau",
            model="any",
            device="any",
            gpus=1,
            source="the benchmark's setting",
            costs=costs,
            kv=KvCapacity(tokens=_MEMORY_TOKENS, prefix_cache=False),
            sequences=setting.slots,
        )

    def training(self, run: TrainingRun) -> TrainingTimes:
        del run
        return NoTraining(self._setting.gap_s)

    def weights(self, run: TrainingRun) -> WeightTerms:
        del run
        return WeightTerms(dense_bytes=_DENSE_BYTES, patch_bytes=_PATCH_BYTES)


class NoTraining(TrainingTimes):
    """Steps follow each other after `gap_s`."""

    def __init__(self, gap_s: float) -> None:
        self._gap_s = gap_s

    def start_s(self) -> float:
        return 0.0

    def gradient_s(self, lengths: Sequence[int]) -> float:
        del lengths
        return 0.0

    def update_s(self) -> float:
        return self._gap_s

    def snapshot_s(self) -> float:
        return 0.0

    def publish_s(self) -> float:
        return 0.0

    def checkpoint_s(self, step: int) -> float:
        del step
        return 0.0
