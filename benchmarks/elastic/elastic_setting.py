"""Builds simulations of RLBoost's settings (arXiv 2510.19225, section 7) on the spot traces that a benchmark names.

A trainer of 8 or 16 H100 and up to six spot instances of two. Lengths and speeds are those that
`benchmarks/simulator/published` has fitted to the paper's points. The paper has no such points for 32B: its responses
are taken as long as those of 14B, and its training as fast per device. All policies send versions of two bytes a
parameter, and lose instances without notice, as the paper replays its traces.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from benchmarks.simulator.published.paper_setting import FLUSH_S, PaperProfiles, PaperTimes, co_located
from benchmarks.simulator.published.rlboost_points import RLBoostPaper
from benchmarks.simulator.published.rlboost_runs import CAP
from ebbtide.coordinator.settings import CoordinatorSettings
from ebbtide.simulator.engines.engine_profile import EngineProfile
from ebbtide.simulator.engines.known_hardware import H100, QWEN3_8B, QWEN3_14B, QWEN3_32B
from ebbtide.simulator.engines.roofline import FITTED, ModelShape, roofline_engine
from ebbtide.simulator.outcome import Outcome
from ebbtide.simulator.scenario.draws.quantity_draws import curve
from ebbtide.simulator.scenario.inputs.input_tables import InputTables
from ebbtide.simulator.scenario.inputs.spot_trace import read_spot_trace
from ebbtide.simulator.scenario.machine_pool import MachinePool, SpotTraceSpec
from ebbtide.simulator.scenario.quantity_spec import LengthSpec, QuantitySpec
from ebbtide.simulator.scenario.scenario import Scenario
from ebbtide.simulator.scenario.training_run import TrainingRun
from ebbtide.simulator.world.policy import Policy
from ebbtide.simulator.world.simulation import Simulation

RUN: Final = "grpo"
#: Machines of a trace are drawn by this seed, so that at most so many are there.
_THINNED_BY, MOST = 0, 6
#: Share of a trace's machines that is drawn: on average some more than `MOST` come, so that lost ones are replaced.
_SHARE: Final = {24: 0.4, 64: 0.15}
#: A trace's first hours, in which its fleet grows, are left out.
_SKIPPED_S: Final = 7_200.0
#: PEARL (arXiv 2609.35158) measured 56 to 67 s to prepare an instance.
_BOOT_S: Final = 60.0
#: Prices as published: eight H100 on demand, and two spot ones, per hour.
NODE_PRICE, SPOT_PRICE = 83.79, 5.32
_HEARTBEAT_S: Final = 1.0


class ElasticModel(NamedTuple):
    """A model as the paper trains it."""

    shape: ModelShape
    nodes: int  # of eight devices, for its trainer
    mean: str  # names of what the paper does not state
    train_us: str
    windows: str  # the public code's table; "": it has none

    @property
    def engines(self) -> int:
        return 4 * self.nodes


MODELS: Final = {
    "8b": ElasticModel(QWEN3_8B, 1, "mean_8b", "train_us_8b", "190 160 105 70"),
    "14b": ElasticModel(QWEN3_14B, 1, "mean_14b", "train_us_14b", "346 212 145 60 8 5"),
    "32b": ElasticModel(QWEN3_32B, 2, "mean_14b", "train_us_14b", ""),
}
_UNSTATED: Final = {one.name: one.value for one in RLBoostPaper.unstated}


class ElasticCase(NamedTuple):
    """One model on one trace."""

    model: str
    trace: Path
    steps: int
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.model} {self.trace.stem}"


class Fleet(NamedTuple):
    """What a policy is given."""

    lends: bool = True  # the trainer's devices generate
    spot: bool = True  # machines come and go by the trace
    reserved: int = 0  # engines of two reserved devices
    window_s: float | None = None
    max_staleness: int = 0


def simulation(case: ElasticCase, policy: Policy, fleet: Fleet) -> Simulation:
    """Build one. The same case has the same work and the same machines under each policy."""
    model = MODELS[case.model]
    local = _engine(model)
    remote = msgspec.structs.replace(local, name=f"{local.name}-remote")
    seconds = _UNSTATED[model.train_us] * 1e-6 * model.shape.active / 1e9 / model.nodes
    times = PaperTimes(token=seconds, snapshot=_UNSTATED["snapshot_s"])
    profiles = PaperProfiles([local, remote], times, sent_gb=model.shape.bytes / 1e9)
    pools = list[MachinePool]()
    if fleet.spot:
        pools.append(_spot(remote, case.trace))
    if fleet.reserved:
        pools.append(_reserved(remote, fleet.reserved))
    if fleet.lends:
        lent = co_located(local, model.engines, RUN)
        pools.append(msgspec.structs.replace(lent, slots=1024, window_s=fleet.window_s))
    scenario = Scenario(
        name=case.name,
        fleet=tuple(pools),
        run=(_training(model, case.steps, fleet.max_staleness),),
        hours=200.0,
        tables=InputTables(spots={str(case.trace): read_spot_trace(case.trace, case.trace.name)}),
    )
    settings = CoordinatorSettings(heartbeat_s=_HEARTBEAT_S, heartbeat_timeout_s=3 * _HEARTBEAT_S)
    return Simulation(scenario, case.seed, policy, profiles, settings)


def simulated_case(case: ElasticCase, policy: Callable[[], Policy], fleet: Fleet) -> Outcome:
    return simulation(case, policy(), fleet).run(lambda _: None)


def _engine(model: ElasticModel) -> EngineProfile:
    engine = roofline_engine(model.shape, H100, 2, efficiency=FITTED._replace(memory=0.6 if model.nodes == 1 else 0.8))
    costs = msgspec.structs.replace(
        engine.costs,
        base_s=engine.costs.base_s + _UNSTATED["step_ms"] / 1e3,
        sequence_s=engine.costs.sequence_s + _UNSTATED["sequence_ms"] / 1e3,
    )
    return msgspec.structs.replace(engine, costs=costs, sequences=256)


def _spot(engine: EngineProfile, trace: Path) -> MachinePool:
    table = read_spot_trace(trace, trace.name)
    size = max((count for _, count in table.counts), default=len({event.node for event in table.events}))
    share = next((share for most, share in _SHARE.items() if size <= most), _SHARE[64] * 64 / max(size, 64))
    spec = SpotTraceSpec(
        file=str(trace), share=share, seed=_THINNED_BY, start_s=min(_SKIPPED_S, 0.2 * table.end_s), most=MOST
    )
    pool = _reserved(engine, 1)
    return msgspec.structs.replace(
        pool, name="spot", kind="spot", workers=None, trace=spec, boot_s=_BOOT_S, price_per_hour=SPOT_PRICE
    )


def _reserved(engine: EngineProfile, workers: int) -> MachinePool:
    return MachinePool(
        name="reserved",
        kind="reserved",
        engine=engine.name,
        workers=workers,
        slots=1024,
        boot_s=0.0,
        link_gbps=50.0,
        flush_s=FLUSH_S,
        price_per_hour=NODE_PRICE / 4,
    )


def _training(model: ElasticModel, steps: int, max_staleness: int) -> TrainingRun:
    spec = LengthSpec(mean=_UNSTATED[model.mean], median=1.0, sigma=_UNSTATED["sigma"])
    return TrainingRun(
        name=RUN,
        trainer="paper",
        trainer_price_per_hour=NODE_PRICE * model.nodes,
        steps=steps,
        max_staleness=max_staleness,
        prompts=128,
        group=8,
        cap=CAP,
        prompt_tokens=QuantitySpec(value=256),
        lengths=LengthSpec(
            median=curve(spec, {}, CAP)(0.0), sigma=_UNSTATED["sigma"], correlation=_UNSTATED["correlation"]
        ),
    )
