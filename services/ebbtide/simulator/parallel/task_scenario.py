"""Reads the scenario of a task: a file, a recorded run, or a file's fleet with a recorded run's work."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from ebbtide.simulator.outcome import Outcome
from ebbtide.simulator.parallel.seed_messages import SeedTask
from ebbtide.simulator.parallel.seed_program import Say
from ebbtide.simulator.recording.recorded_scenario import recorded_fleet, with_recorded_work
from ebbtide.simulator.recording.recording_file import read_record
from ebbtide.simulator.scenario.reading.scenario_reader import read_scenario
from ebbtide.simulator.scenario.scenario import Scenario


def scenario_name(task: SeedTask) -> str:
    """Reads everything that the task names, and returns its scenario's name. Raises `InvalidRequest`."""
    with task_scenario(task) as scenario:
        return scenario.name


def simulate_task(task: SeedTask, say: Say) -> Outcome:
    """Simulates the task's scenario. Raises `InvalidRequest` for faulty input."""
    from ebbtide.simulator.world.simulation import simulate

    with task_scenario(task) as scenario:
        return simulate(scenario, seed=task.seed, say=say)


@contextmanager
def task_scenario(task: SeedTask) -> Iterator[Scenario]:
    """The scenario; files that it may name are there as long as the block lasts. Raises `InvalidRequest`."""
    recorded = read_record(Path(task.recording)) if task.recording else None
    if recorded is None:
        yield read_scenario(Path(task.scenario))
    elif task.scenario:
        yield with_recorded_work(recorded, read_scenario(Path(task.scenario)), task.scenario)
    else:
        with TemporaryDirectory(prefix="ebbtide-") as folder:
            yield recorded_fleet(recorded, Path(folder), task.recording)
