"""Plays cases under policies in the simulator, one process per core, and keeps what tables need."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from os import sched_getaffinity
from time import process_time

from msgspec import Struct

from benchmarks.log_level import errors_only
from benchmarks.replay.fair_oracle import FairOraclePolicy
from benchmarks.replay.setting import Compared
from benchmarks.replay.trace_scenario import PlateauProfiles, ReplayCase, machine_losses, trace_scenario
from ebbtide.simulator.world.simulation import Simulation

Say = Callable[[str], None]


class PlayedCase(Struct, frozen=True, kw_only=True):
    """What a policy made of a case. `ends`: when each step ended, in seconds; `tokens`, `rollouts`: of those steps;
    `finished`: rollouts, those of the step that the end cut off included; `generated`, `twice`: tokens of all rollouts,
    also of those that the end cut off.
    """

    policy: str
    ends: list[float]
    tokens: int
    rollouts: int
    finished: int
    generated: int
    twice: int
    resumes: int
    moves: int
    cpu_s: float

    @property
    def share_twice(self) -> float:
        """Of all tokens generated, the share that was generated again."""
        return self.twice / self.generated if self.generated else 0.0

    @property
    def attempts_per_rollout(self) -> float:
        return 1.0 + self.resumes / self.rollouts if self.rollouts else 0.0

    @property
    def moves_per_rollout(self) -> float:
        return self.moves / self.finished if self.finished else 0.0


def play(case: ReplayCase, compared: Compared) -> PlayedCase:
    began = process_time()
    profiles = PlateauProfiles(case.setting)
    scenario = trace_scenario(case, compared)
    policy = compared.policy
    if compared.foresees:
        policy = FairOraclePolicy(losses=machine_losses(scenario, case.setting.seed))
    outcome = Simulation(scenario, case.setting.seed, policy, profiles).run(lambda _: None)
    rollouts = sum(step.rollouts for step in outcome.steps)
    return PlayedCase(
        policy=compared.name,
        ends=[step.trained_s for step in outcome.steps],
        tokens=sum(step.tokens for step in outcome.steps),
        rollouts=rollouts,
        finished=rollouts + (case.setting.rollouts - outcome.unfinished if outcome.unfinished else 0),
        generated=outcome.tokens.generated,
        twice=outcome.tokens.twice,
        resumes=outcome.resumes,
        moves=outcome.moves,
        cpu_s=process_time() - began,
    )


def play_all(works: Sequence[tuple[ReplayCase, Compared]]) -> Iterator[PlayedCase]:
    """Play all, as many at a time as there are cores. Results come in the order of `works`."""
    with ProcessPoolExecutor(len(sched_getaffinity(0)), initializer=errors_only) as processes:
        yield from processes.map(play, *zip(*works, strict=True))


def speed_ratio(one: Sequence[float], other: Sequence[float]) -> float:
    """By how much `one` is faster than `other`, over as many steps as both ended: the same steps, so the same tokens.

    Not tokens by the trace's end, in which a step's cheap beginning would count for more than its expensive tail.
    """
    steps = min(len(one), len(other))
    return other[steps - 1] / one[steps - 1] if steps else 0.0
