"""Measures scorings beside rollouts, on real processes with all times scaled down, and in the simulator at full scale.

Real: responses of a step end over a rollout, by fitted lengths of code. The step is over with its last reward.
`after`: they are scored behind the rollout, by as many processes. `bound`: each in the process of its episode, as
responses end. `beside`: by any idle process. Simulated: steps of a run under two of them, with as many scorers as
responses.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from math import exp
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any, Final

from benchmarks.log_level import errors_only
from benchmarks.long_tail.rewards.scored_responses import QUANTILES, drawn_s
from ebbtide.driver.environment_processes import EnvironmentProcesses
from ebbtide.driver.environments import EpisodeClock
from ebbtide.driver.host_process import TookTooLong, host_plan
from ebbtide.driver.settings import DriverSettings, EnvironmentSettings
from ebbtide.simulator.scenario.input_tables import InputTables, QuantileTable
from ebbtide.simulator.scenario.machine_pool import MachinePool
from ebbtide.simulator.scenario.quantity_spec import LengthSpec, QuantitySpec
from ebbtide.simulator.scenario.scenario import Scenario
from ebbtide.simulator.scenario.training_run import SimulatedEnvironment, SimulatedRewards, TrainingRun
from ebbtide.simulator.simulate import simulate
from ebbtide.types.run import EnvironmentSpec, RunSpec, TailSpec

#: Lengths of responses with code: median and 90 % of RollPacker's figure, at its cap for 7B models.
_LENGTHS: Final = LengthSpec(median=663, sigma=0.72, tail_sigma=0.95, tail_from=1.05, correlation=0.5)
_CAP: Final = 8192
#: RollPacker's ceiling of a scoring.
_CEILING_S: Final = 30.0
#: Real times are so much shorter, so that a step takes seconds.
_SCALE: Final = 0.05
_GROUPS, _GROUP, _PROCESSES = 16, 8, 8
#: Beyond what any call takes.
_LONG_S: Final = 600.0
#: Seconds of decoding a token, at full scale: a rollout at the cap takes 82 s, as in RollPacker's 7B setting.
_TOKEN_S: Final = 0.01
_TABLE: Final = "sandbox"
_WAYS: Final[dict[str, SimulatedRewards]] = {
    "after": SimulatedRewards(when="after", timeout_s=_CEILING_S),
    "beside": SimulatedRewards(timeout_s=_CEILING_S),
}


def rewards_part(tell: Callable[[str], None], *, quick: bool) -> dict[str, Any]:
    """Seconds of steps by the way of scoring, real ones rescaled, and how often the last are in those scored behind."""
    errors_only()
    real = {
        way: mean(asyncio.run(_real_step(way, seed)) for seed in range(1 if quick else 3))
        for way in ("after", "bound", "beside")
    }
    simulated = {way: _simulated_steps(rewards, 1 if quick else 3) for way, rewards in _WAYS.items()}
    for name, found in (("real", real), ("simulated", simulated)):
        told = ", ".join(f"{way} {seconds:.1f} s ({found['after'] / seconds:.2f}x)" for way, seconds in found.items())
        tell(f"rewards, {name} steps: {told}")
    return {
        "figures": {},
        "scale": _SCALE,
        "real_step_s": real,
        "simulated_step_s": simulated,
        "real_after_over_beside": real["after"] / real["beside"],
        "simulated_after_over_beside": simulated["after"] / simulated["beside"],
    }


async def _real_step(way: str, seed: int) -> float:
    """Seconds at full scale until a step has all rewards, measured at a smaller one."""
    settings = DriverSettings(
        environment_threads=_PROCESSES,
        scoring_processes=0 if way == "bound" else _PROCESSES,
        environments=EnvironmentSettings(paths=(str(Path(__file__).parents[3]),), trust=True),
    )
    tail = TailSpec(reward_timeout_s=_CEILING_S * _SCALE)
    environment = EnvironmentSpec(name="benchmarks.long_tail.rewards.scored_responses:ScoredResponses")
    spec = RunSpec(name="run", model="model", environment=environment, tail=tail)
    environments = EnvironmentProcesses(spec, settings, host_plan(settings))
    try:
        await _warmed_up(environments)
        return await _scored_step(environments, way, seed) / _SCALE
    finally:
        await environments.close()


async def _warmed_up(environments: EnvironmentProcesses) -> None:
    """Starts all processes, as those of a run's former step."""
    warm = [environments.episode("train", 10_000 + number) for number in range(2 * _PROCESSES)]
    clocks = [EpisodeClock(_LONG_S) for _ in warm]
    await asyncio.gather(*(one.reset(clock) for one, clock in zip(warm, clocks, strict=True)))
    scored = (one.step(clock, f"{0.3 * _SCALE}", last=True) for one, clock in zip(warm, clocks, strict=True))
    await asyncio.gather(*scored)
    for one in warm:
        one.close()


async def _scored_step(environments: EnvironmentProcesses, way: str, seed: int) -> float:
    draw, began = Random(seed), time.monotonic()
    ends = [_TOKEN_S * _SCALE * _length(draw) for _ in range(_GROUPS * _GROUP)]
    takes = [drawn_s(draw) * _SCALE for _ in ends]

    async def play(number: int) -> None:
        episode = environments.episode("train", number // _GROUP)
        clock = EpisodeClock(_CEILING_S * _SCALE if way == "bound" else _LONG_S)
        await episode.reset(EpisodeClock(_LONG_S))
        await asyncio.sleep(began + (max(ends) if way == "after" else ends[number]) - time.monotonic())
        with suppress(*([TookTooLong] if way == "bound" else [])):  # only there its episode's clock cuts it
            await episode.step(clock, f"{takes[number]:.4f}", last=True)
        episode.close()

    await asyncio.gather(*(play(number) for number in range(len(ends))))
    return time.monotonic() - began


def _length(draw: Random) -> float:
    u = draw.gauss()
    tokens = 663.0 * exp(0.72 * u + 0.95 * max(0.0, u - 1.05))
    return min(float(_CAP), tokens)


def _simulated_steps(rewards: SimulatedRewards, seeds: int) -> float:
    """Mean seconds from a step's begin to its last reward."""
    return mean(
        one.generated_s - one.opened_s for seed in range(seeds) for one in simulate(_scenario(rewards), seed=seed).steps
    )


def _scenario(rewards: SimulatedRewards) -> Scenario:
    shares, seconds = zip(*QUANTILES, (QUANTILES[-1][0] + 1e-6, 3600.0), (1.0, 3600.0), strict=True)
    run = TrainingRun(
        name="code",
        trainer="h100x8-qwen3-14b",
        lengths=_LENGTHS,
        cap=_CAP,
        steps=6,
        environment=SimulatedEnvironment(reward_s=QuantitySpec(file=_TABLE)),
        rewards=rewards,
    )
    fleet = (MachinePool(name="reserved", engine="h100x2-qwen3-14b", workers=8),)
    tables = InputTables(quantiles={_TABLE: QuantileTable(tuple(shares), tuple(seconds), continued=True)})
    return Scenario(name="code", fleet=fleet, run=(run,), tables=tables)
