"""Times the simulator on two large scenarios: `python -m benchmarks.simulator.speed`, from the root of the repository.

Each is simulated in a process of its own, so that its memory is its own. Seconds are those of the processor: a
simulation is one thread, and other work on the machine does not count.
"""

import resource
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from time import process_time
from typing import Final

from msgspec import Struct

from benchmarks.log_level import errors_only
from benchmarks.replay.setting import Setting
from benchmarks.replay.trace_scenario import PlateauProfiles
from ebbtide.simulator.outcome import Outcome
from ebbtide.simulator.scenario.machine_pool import MachinePool
from ebbtide.simulator.scenario.quantity_spec import LengthSpec
from ebbtide.simulator.scenario.scenario import Scenario
from ebbtide.simulator.scenario.training_run import TrainingRun
from ebbtide.simulator.world.ebbtide_policy import EbbtidePolicy
from ebbtide.simulator.world.simulation import Simulation

_SLOTS: Final = 16
#: A rollout makes 30 tokens/s, however many run beside it.
_ENGINES: Final = Setting(rate=30.0, plateau=_SLOTS, slots=_SLOTS)
_CAP: Final = 32_768
_MEAN_TOKENS: Final = 4_000
#: Of a machine, at random; another comes after two minutes.
_LOSSES_PER_HOUR: Final = 0.5
#: Responses of a step: 16 for each slot, so that slots are seldom empty.
_PROMPTS_PER_SLOT: Final = 2
_GROUP: Final = 8


class TimedSimulation(Struct, frozen=True, kw_only=True):
    seconds: float  # of the processor
    memory_mib: float  # most that the process held
    outcome: Outcome


def day_of_32_workers() -> TimedSimulation:
    """24 h of 32 workers with 16 slots, 4,000 tokens a response on average, 30 tokens/s a rollout."""
    return in_own_process(large_scenario(workers=32, hours=24.0))


def half_hour_of_1000_workers() -> TimedSimulation:
    """30 min of 1,000 such workers."""
    return in_own_process(large_scenario(workers=1_000, hours=0.5))


def large_scenario(*, workers: int, hours: float) -> Scenario:
    pool = MachinePool(
        name="spot",
        kind="spot",
        engine="plateau",
        workers=workers,
        slots=_SLOTS,
        losses_per_hour=_LOSSES_PER_HOUR,
    )
    run = TrainingRun(
        name="run",
        trainer="none",
        prompts=_PROMPTS_PER_SLOT * _SLOTS * workers,
        group=_GROUP,
        cap=_CAP,
        lengths=LengthSpec(mean=_MEAN_TOKENS, most=_CAP),
    )
    return Scenario(name=f"{workers} workers", hours=hours, fleet=(pool,), run=(run,))


def in_own_process(scenario: Scenario) -> TimedSimulation:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(timed, scenario).result()


def timed(scenario: Scenario) -> TimedSimulation:
    """Simulate a scenario here. The memory is that of the whole process so far."""
    errors_only()
    began = process_time()
    outcome = Simulation(scenario, 0, EbbtidePolicy(), PlateauProfiles(_ENGINES)).run(lambda _: None)
    memory_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return TimedSimulation(seconds=process_time() - began, memory_mib=memory_mib, outcome=outcome)


def main() -> None:
    for simulate in (half_hour_of_1000_workers, day_of_32_workers):
        found = simulate()
        outcome = found.outcome
        print(
            f"{outcome.scenario}: {found.seconds:.0f} s, {found.memory_mib:.0f} MiB; {outcome.tokens.kept:,} tokens, "
            f"{len(outcome.steps)} steps, {outcome.moves} moves",
            flush=True,
        )


if __name__ == "__main__":
    main()
