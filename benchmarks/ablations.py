"""What single mechanisms of the rollout layer bring: each is played on and off, in five simulated scenes.

    python -m benchmarks.ablations [--seeds N ...] [--scenes NAME ...] [--mechanisms NAME ...] [--jobs N] [--out PATH]

Scenes: `spot` (some eight machines of a recorded spot fleet, unlike in speed), `mixed` (three fast engines and three
slow ones with less memory, of which some are lost), `tail` (few groups of long-tailed responses on the trainer's own
devices, with code to score), `agents` (sessions of two to six turns, with caches for most of those that wait), `memory`
(like engines with little memory for keys and values). A figure is the speed with a mechanism over that without it, on
the same work: of all steps, or in tokens/s for agents. A mechanism that cannot matter in a scene is not played there.
Simulated workers take what fits into their engines, so `benchmarks.long_tail --parts admission` measures the rest.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from benchmarks import arguments
from benchmarks.conditions import conditions
from benchmarks.elastic.compared.simulating_processes import each_simulated
from benchmarks.elastic.mixed_setting import SLOW, MixedCase, engines, scenario
from benchmarks.log_level import errors_only
from benchmarks.long_tail.lengths.length_marginals import TRACES
from benchmarks.long_tail.rewards.scored_responses import QUANTILES
from benchmarks.replay.run import UNEVEN
from benchmarks.replay.setting import BALANCE
from benchmarks.replay.trace_scenario import PlateauProfiles, ReplayCase, trace_scenario
from benchmarks.rivals.ablated_policy import AblatedPolicy
from benchmarks.rivals.changed_rounds import NO_KINDS, NO_MEMORY, ChangedPolicy, Replaced
from benchmarks.simulator.published.paper_setting import FLUSH_S, PaperProfiles, PaperTimes, co_located
from benchmarks.turn_routing.routed_fleet import RoutedFleet
from benchmarks.turn_routing.routed_trials import BASE
from ebbtide.coordinator.rules import turn_routing
from ebbtide.coordinator.settings import CoordinatorSettings
from ebbtide.simulator.scenario.input_tables import InputTables, QuantileTable, read_quantiles, read_spot_trace
from ebbtide.simulator.scenario.machine_pool import MachinePool
from ebbtide.simulator.scenario.quantity_spec import LengthSpec, QuantitySpec
from ebbtide.simulator.scenario.scenario import Scenario
from ebbtide.simulator.scenario.training_run import SimulatedEnvironment, SimulatedRewards, TrainingRun
from ebbtide.simulator.world.simulation import Policy, Profiles, Simulation

#: Of RollPacker's figure of sandboxes, the rest never ends; cut after so many seconds.
_SANDBOX, _CEILING_S = "sandbox", 30.0
_HEARTBEAT_S: Final = 1.0
_STEPS: Final = 4
#: With which rounds may go on: steps that generation may run ahead of training.
_STALENESS: Final = 4
_GROUP: Final = 8
_SEEDS: Final = (0, 1, 2)


class Setup(Struct, frozen=True, kw_only=True):
    """Which parts are on. `parts`: that stand for others of the dispatch."""

    order: Literal["lengths", "submitted"] = "submitted"
    rounds: Literal["off", "whole_groups"] = "off"
    staleness: int = 0
    parts: tuple[Replaced, ...] = ()
    without: str = ""  # a part that `AblatedPolicy` knows

    @property
    def policy(self) -> Policy:
        if self.without:
            return msgspec.convert({self.without: False}, AblatedPolicy)
        return ChangedPolicy(parts=self.parts, rounds_of_steps=self.rounds)


class Mechanism(NamedTuple):
    """`off` and `on`; `moot`: why it cannot matter, by scene."""

    off: Setup
    on: Setup
    moot: Mapping[str, str]


def _part(*parts: Replaced, without: str = "", **moot: str) -> Mechanism:
    return Mechanism(Setup(parts=parts, without=without), Setup(), moot)


_ONE_TURN = dict.fromkeys(("spot", "mixed", "tail", "memory"), "episodes have one turn")
_ALIKE = dict.fromkeys(("tail", "memory", "agents"), "workers are alike")
_SESSIONS = {"agents": "sessions are not in groups"}
_HOLDS = {"spot": "memory holds all", "tail": "memory holds all"}
_BLIND = Replaced(turn_routing.TurnRouter, "cached", lambda *_: None)
MECHANISMS: Final = {
    "order by lengths": Mechanism(Setup(), Setup(order="lengths"), _SESSIONS),
    "whole-group rounds": Mechanism(
        Setup(staleness=_STALENESS), Setup(staleness=_STALENESS, rounds="whole_groups"), _SESSIONS
    ),
    "admission by memory": Mechanism(
        Setup(), Setup(), dict.fromkeys(("spot", "mixed", "tail", "agents", "memory"), "not simulated")
    ),
    "turn routing": _part(_BLIND, **_ONE_TURN),
    "memory-aware offers": _part(NO_MEMORY, **_HOLDS),
    "speeds by kind": _part(NO_KINDS, **_ALIKE),
    "learnt speeds": _part(without="learns"),
    "moves": _part(without="balances"),
}


class Ablated(Struct, frozen=True, kw_only=True):
    """One mechanism in one scene. `speeds`: by seed, off and on, in steps/hour or tokens/s; `ratio`: mean, least and
    most of on over off.
    """

    mechanism: str
    scene: str
    moot: str = ""
    ratio: tuple[float, float, float] | None = None
    speeds: list[tuple[float, float]] = []


def _steps_per_hour(made: Scenario, seed: int, setup: Setup, profiles: Profiles) -> float:
    settings = CoordinatorSettings(heartbeat_s=_HEARTBEAT_S, heartbeat_timeout_s=3 * _HEARTBEAT_S)
    run = replace(made.run[0], order=setup.order, max_staleness=setup.staleness)
    outcome = Simulation(replace(made, run=(run,)), seed, setup.policy, profiles, settings).run(lambda _: None)
    if len(outcome.steps) < (run.steps or 0):
        raise RuntimeError(f"only {len(outcome.steps)} of {run.steps} steps ended: name a longer trace")
    return 3600.0 * len(outcome.steps) / outcome.steps[-1].trained_s


def _spot(setup: Setup, seed: int, traces: Path) -> float:
    path, lengths = traces / "spot_aws_g4dn_24.csv", traces / "response_length_deepseek_r1_quantiles.csv"
    setting = replace(UNEVEN, seed=seed, rollouts=128, slots=16)
    trace = read_spot_trace(path, str(path))
    table = read_quantiles(lengths, str(lengths))
    case = ReplayCase(trace=trace, lengths=table, stretch=2.0, setting=setting, share=1 / 3)
    made = trace_scenario(case, BALANCE)
    grouped = replace(
        made.run[0],
        prompts=setting.rollouts // _GROUP,
        group=_GROUP,
        steps=_STEPS,
        lengths=replace(made.run[0].lengths, correlation=0.5),
    )
    return _steps_per_hour(replace(made, run=(grouped,)), seed, setup, PlateauProfiles(setting))


def _mixed(setup: Setup, seed: int, _: Path) -> float:
    case = MixedCase("mixed", small=True, lost=SLOW, slots=96, steps=_STEPS, seed=seed)
    return _steps_per_hour(
        scenario(case), seed, setup, PaperProfiles(list(engines(case).values()), PaperTimes(update=1.0))
    )


def _tail(setup: Setup, seed: int, _: Path) -> float:
    engine = next(iter(engines(MixedCase("tail")).values()))
    shares, seconds = zip(*QUANTILES, (QUANTILES[-1][0] + 1e-6, 3600.0), (1.0, 3600.0), strict=True)
    run = TrainingRun(
        name="tail",
        trainer="paper",
        steps=3 * _STEPS,
        prompts=16,
        group=_GROUP,
        cap=24_576,
        lengths=LengthSpec(median=1_000, sigma=1.2, correlation=0.5),
        environment=SimulatedEnvironment(reward_s=QuantitySpec(file=_SANDBOX)),
        rewards=SimulatedRewards(timeout_s=_CEILING_S),
    )
    fleet = replace(co_located(engine, 2, run.name), slots=8)
    tables = InputTables(quantiles={_SANDBOX: QuantileTable(tuple(shares), tuple(seconds), continued=True)})
    made = Scenario(name="tail", fleet=(fleet,), run=(run,), hours=200.0, tables=tables)
    return _steps_per_hour(made, seed, setup, PaperProfiles([engine], PaperTimes(update=30.0)))


def _memory(setup: Setup, seed: int, _: Path) -> float:
    case = MixedCase("memory", slow=0, steps=_STEPS, seed=seed)
    engine = next(iter(engines(case).values()))
    engine = replace(engine, kv=replace(engine.kv, tokens=120_000))
    pool = MachinePool(name="fleet", engine=engine.name, workers=4, slots=128, boot_s=0.0, flush_s=FLUSH_S)
    made = replace(scenario(case), fleet=(pool,))
    return _steps_per_hour(made, seed, setup, PaperProfiles([engine], PaperTimes(update=1.0)))


def _agents(setup: Setup, seed: int, _: Path) -> float:
    """In tokens/s."""
    setting = replace(BASE, kv_tokens=150_000, slots=40, warm_s=60.0, counted_s=120.0)
    return RoutedFleet(setting, seed, setup.policy.decider).run().tokens_per_s


SCENES: Final[dict[str, Callable[[Setup, int, Path], float]]] = {
    "spot": _spot,
    "mixed": _mixed,
    "tail": _tail,
    "agents": _agents,
    "memory": _memory,
}


def _played(traces: Path, one: tuple[str, str, str, int]) -> float:
    errors_only()
    mechanism, scene, state, seed = one
    return SCENES[scene](getattr(MECHANISMS[mechanism], state), seed, traces)


def ablated(
    mechanisms: Sequence[str], scenes: Sequence[str], seeds: Sequence[int], *, traces: Path, jobs: int
) -> list[Ablated]:
    """Play all. A setup that several mechanisms share in a scene is played once."""
    pairs = [(name, scene) for name in mechanisms for scene in scenes if scene not in MECHANISMS[name].moot]
    firsts: dict[tuple[str, str, int], tuple[str, str, str, int]] = {}
    works = [(name, scene, state, seed) for name, scene in pairs for state in ("off", "on") for seed in seeds]
    for work in works:
        firsts.setdefault(_same(work), work)
    played = partial(_played, traces)
    speeds = dict[tuple[str, str, int], float]()
    for one, speed in each_simulated(played, list(firsts.values()), jobs, repr):
        speeds[_same(one)] = speed
        print(f"{len(speeds)} of {len(firsts)}: {one}: {speed:.3f}", file=sys.stderr, flush=True)
    found = []
    for name in mechanisms:
        for scene in scenes:
            if moot := MECHANISMS[name].moot.get(scene):
                found.append(Ablated(mechanism=name, scene=scene, moot=moot))
                continue
            off, on = ([speeds[_same((name, scene, state, seed))] for seed in seeds] for state in ("off", "on"))
            both = list(zip(off, on, strict=True))
            ratios = [with_it / without for without, with_it in both]
            spread = (fmean(ratios), min(ratios), max(ratios))
            found.append(Ablated(mechanism=name, scene=scene, ratio=spread, speeds=both))
    return found


def _same(work: tuple[str, str, str, int]) -> tuple[str, str, int]:
    mechanism, scene, state, seed = work
    return scene, repr(getattr(MECHANISMS[mechanism], state)), seed


def row(one: Ablated) -> str:
    if one.ratio is None:
        return f"{one.mechanism:<24}{one.scene:<8} cannot matter: {one.moot}"
    mean, least, most = one.ratio
    off, on = (fmean(speeds) for speeds in zip(*one.speeds, strict=True))
    unit = "tokens/s" if one.scene == "agents" else "steps/h"
    return f"{one.mechanism:<24}{one.scene:<8} {mean:.3f} ({least:.3f} to {most:.3f}), {off:.1f} to {on:.1f} {unit}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ablations",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=list(_SEEDS))
    parser.add_argument("--scenes", nargs="+", choices=list(SCENES), default=list(SCENES))
    parser.add_argument("--mechanisms", nargs="+", choices=list(MECHANISMS), default=list(MECHANISMS))
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder of recorded fleets and lengths")
    parser.add_argument("--jobs", type=arguments.count, default=min(2, len(os.sched_getaffinity(0))))
    parser.add_argument("--out", type=arguments.output, default=arguments.result("ablations"))
    options = parser.parse_args(argv)
    under = conditions()
    found = ablated(options.mechanisms, options.scenes, options.seeds, traces=options.traces, jobs=options.jobs)
    print(*map(row, found), sep="\n")
    report: dict[str, Any] = {"conditions": under, "seeds": options.seeds, "ablations": msgspec.to_builtins(found)}
    options.out.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
