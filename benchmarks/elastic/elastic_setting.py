"""Builds simulations of RLBoost's settings (arXiv 2510.19225, section 7) on the spot traces that a benchmark names.

A trainer of 8 or 16 H100 and up to six spot instances of two. What the paper does not state stands in `assumptions`.
It has no points for 32B: its responses are taken as long as those of 14B, and its training as fast per device. All
policies send versions of two bytes a parameter, and lose instances without notice, as the paper replays its traces.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from benchmarks.elastic.assumptions import UNSTATED, Assumptions
from benchmarks.simulator.published.paper_setting import FLUSH_S, PaperProfiles, PaperTimes, co_located
from benchmarks.simulator.published.rlboost_runs import CAP
from ebbtide.coordinator.settings import CoordinatorSettings
from ebbtide.simulator.engines.engine_profile import EngineProfile
from ebbtide.simulator.engines.roofline import FITTED, H100, QWEN3_8B, QWEN3_14B, QWEN3_32B, ModelShape, roofline_engine
from ebbtide.simulator.scenario.input_tables import InputTables, TraceEvent, read_quantiles, read_spot_trace
from ebbtide.simulator.scenario.machine_pool import MachinePool, SpotTraceSpec
from ebbtide.simulator.scenario.quantity_spec import LengthSpec, QuantitySpec
from ebbtide.simulator.scenario.scenario import Scenario
from ebbtide.simulator.scenario.training_run import TrainingRun
from ebbtide.simulator.scenario.workload import curve
from ebbtide.simulator.world.simulation import Policy, Simulation

RUN: Final = "grpo"
#: A trace's first hours, in which its fleet grows, are left out; of a short one the first fifth.
_SKIPPED_S: Final = 7_200.0
_SKIPPED_SHARE: Final = 0.2
#: Dollars for eight H100 on demand for an hour, as published.
NODE_PRICE: Final = 83.79
#: Share of memory that engines of a trainer of two nodes get: with less the weights of 32B leave no room for contexts.
_LARGE_MEMORY: Final = 0.8
_HEARTBEAT_S: Final = 1.0
#: Tokens of a prompt: the paper's have at most 512.
_PROMPT: Final = 256
#: Rollouts that each engine is set to take, running or waiting, under every policy. Ebbtide's own rule offers fewer, by
#: the engine's memory; the rivals' rules bound what they send, or queue it.
_SLOTS: Final = 1024


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


class ElasticCase(NamedTuple):
    """One model on one trace."""

    model: str
    trace: Path
    steps: int
    seed: int = 0
    assumed: Assumptions = Assumptions()
    lengths: Path | None = None  # of responses; None: as the paper's points were fitted
    scale: int = 1  # one of so many parts of the prompts, and of the trainer with its devices

    @property
    def name(self) -> str:
        """Model and trace, and what is not as usual."""
        changed = "".join(f" {name}={value:g}" for name, value in self.assumed.changed().items())
        return f"{self.model} {self.trace.stem}" + (f" seed={self.seed}" if self.seed else "") + changed

    @property
    def told(self) -> str:
        """All that the case is, but for the contents of its files."""
        return repr(
            (self.model, self.trace.name, self.steps, self.seed, self.assumed, self.lengths is None, self.scale)
        )

    @property
    def files(self) -> list[Path]:
        return [path for path in (self.trace, self.lengths) if path is not None]


class Fleet(NamedTuple):
    """What a policy is given."""

    lends: bool = True  # the trainer's devices generate
    spot: bool = True  # machines come and go by the trace
    reserved: int = 0  # engines of two reserved devices
    nodes: int = 1  # times the nodes that the model's trainer has
    window_s: float | None = None
    max_staleness: int = 0


def simulation(case: ElasticCase, policy: Policy, fleet: Fleet) -> Simulation:
    """Build one. The same case has the same work and the same machines under each policy."""
    model, assumed = MODELS[case.model], case.assumed
    local = _engine(model, assumed)
    remote = msgspec.structs.replace(local, name=f"{local.name}-remote")
    times = PaperTimes(token=case.scale * _token_s(model, assumed, fleet.nodes), snapshot=UNSTATED["snapshot_s"])
    profiles = PaperProfiles([local, remote], times, sent_gb=assumed.sent * model.shape.bytes / 1e9)
    pools = list[MachinePool]()
    if fleet.spot:
        pools.append(_spot(remote, case))
    if fleet.reserved:
        pools.append(_steady(remote, fleet.reserved))
    if fleet.lends:
        lent = co_located(local, model.engines * fleet.nodes // case.scale, RUN)
        pools.append(msgspec.structs.replace(lent, window_s=fleet.window_s))
    scenario = Scenario(
        name=case.name,
        fleet=tuple(msgspec.structs.replace(pool, slots=_SLOTS) for pool in pools),
        run=(_training(case, fleet),),
        hours=200.0,
        tables=_tables(case),
    )
    settings = CoordinatorSettings(heartbeat_s=_HEARTBEAT_S, heartbeat_timeout_s=3 * _HEARTBEAT_S)
    return Simulation(scenario, case.seed, policy, profiles, settings)


def _engine(model: ElasticModel, assumed: Assumptions) -> EngineProfile:
    memory = _LARGE_MEMORY if model.nodes > 1 and assumed.memory < _LARGE_MEMORY else assumed.memory
    engine = roofline_engine(model.shape, H100, 2, efficiency=FITTED._replace(memory=memory))
    costs = msgspec.structs.replace(
        engine.costs,
        base_s=engine.costs.base_s + UNSTATED["step_ms"] / 1e3,
        sequence_s=engine.costs.sequence_s + UNSTATED["sequence_ms"] / 1e3,
    )
    delays = msgspec.structs.replace(
        engine.delays, wake_s=engine.delays.wake_s + assumed.switch_s, sleep_s=assumed.switch_s
    )
    return msgspec.structs.replace(engine, costs=costs, sequences=256, delays=delays)


def _token_s(model: ElasticModel, assumed: Assumptions, nodes: int) -> float:
    """Seconds to compute a token's gradient on all devices of the trainer."""
    alone = assumed.training * UNSTATED[model.train_us] * 1e-6 * model.shape.active / 1e9
    return alone / (model.nodes * (1.0 if nodes == 1 else nodes * assumed.two_nodes))


def _steady(engine: EngineProfile, workers: int) -> MachinePool:
    return MachinePool(
        name="reserved",
        kind="reserved",
        engine=engine.name,
        workers=workers,
        boot_s=0.0,
        link_gbps=50.0,
        flush_s=FLUSH_S,
        price_per_hour=NODE_PRICE / 4,
    )


def _spot(engine: EngineProfile, case: ElasticCase) -> MachinePool:
    return msgspec.structs.replace(
        _steady(engine, 1),
        name="spot",
        kind="spot",
        workers=None,
        trace=thinned(case.trace, case.assumed),
        boot_s=case.assumed.boot_s,
        notice_s=case.assumed.notice_s,
        price_per_hour=case.assumed.spot_price,
    )


def thinned(trace: Path, assumed: Assumptions) -> SpotTraceSpec:
    """So many machines are drawn that `assumed.most` are there on average. Of the shared trace of AWS that is half, as
    the paper draws. More wait, and take the places of those that are lost.
    """
    table = read_spot_trace(trace, trace.name)
    start_s = min(_SKIPPED_S, _SKIPPED_SHARE * table.end_s)
    counts = table.counts or _counted(table.events)
    there_s = sum(
        count * (end_s - max(begin_s, start_s))
        for (begin_s, count), (end_s, _) in pairwise((*counts, (table.end_s, 0)))
        if end_s > start_s
    )
    mean = there_s / max(1e-9, table.end_s - start_s)
    share = min(1.0, assumed.drawn * assumed.most / max(mean, 1e-9))
    return SpotTraceSpec(file=trace.name, share=share, seed=assumed.thinned_by, start_s=start_s, most=assumed.most)


def _counted(events: Sequence[TraceEvent]) -> list[tuple[float, int]]:
    changes = accumulate(1 if event.joins else -1 for event in events)
    return [(event.at_s, count) for event, count in zip(events, changes, strict=True)]


def _training(case: ElasticCase, fleet: Fleet) -> TrainingRun:
    model, assumed = MODELS[case.model], case.assumed
    return TrainingRun(
        name=RUN,
        trainer="paper",
        trainer_price_per_hour=NODE_PRICE * model.nodes * fleet.nodes / case.scale,
        steps=case.steps,
        max_staleness=fleet.max_staleness,
        prompts=128 // case.scale,
        group=8,
        cap=CAP,
        prompt_tokens=QuantitySpec(value=_PROMPT),
        lengths=_lengths(case, assumed.mean * UNSTATED[model.mean]),
    )


def _lengths(case: ElasticCase, mean: float) -> LengthSpec:
    assumed = case.assumed
    if case.lengths is not None:
        return LengthSpec(file=case.lengths.name, correlation=assumed.correlation)
    spec = LengthSpec(mean=mean, median=1.0, sigma=assumed.sigma)
    return LengthSpec(median=curve(spec, {}, CAP)(0.0), sigma=assumed.sigma, correlation=assumed.correlation)


def _tables(case: ElasticCase) -> InputTables:
    """Files go by their names, so that draws do not hang on the folders they are in."""
    lengths = case.lengths
    return InputTables(
        spots={case.trace.name: read_spot_trace(case.trace, case.trace.name)},
        quantiles={lengths.name: read_quantiles(lengths, lengths.name)} if lengths is not None else {},
    )
