"""Reads the scenario of a task: a file, a recorded run, or a file's fleet with a recorded run's work."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from ebbtide.errors import InvalidRequest
from ebbtide.simulator.engines.engine_profile import EngineProfile
from ebbtide.simulator.engines.profile_files import read_profile
from ebbtide.simulator.engines.trainer_profile import TrainerProfile
from ebbtide.simulator.outcome import Outcome
from ebbtide.simulator.parallel.seed_messages import SeedTask
from ebbtide.simulator.parallel.seed_program import Say
from ebbtide.simulator.recording.recorded_scenario import recorded_fleet, with_recorded_work
from ebbtide.simulator.recording.recording_file import read_record
from ebbtide.simulator.scenario.reading.known_names import EngineLimits, KnownNames, ProfileKind
from ebbtide.simulator.scenario.reading.scenario_reader import read_scenario
from ebbtide.simulator.scenario.scenario import Scenario
from ebbtide.simulator.serving.pair_costs import named_costs
from ebbtide.simulator.simulate import POLICIES, SINGLE_RUN, simulate


def scenario_name(task: SeedTask) -> str:
    """Reads everything that the task names, and returns its scenario's name. Raises `InvalidRequest`."""
    with task_scenario(task) as scenario:
        return scenario.name


def simulate_task(task: SeedTask, say: Say) -> Outcome:
    """Simulates the task's scenario. Raises `InvalidRequest` for faulty input."""
    with task_scenario(task) as scenario:
        return simulate(scenario, seed=task.seed, say=say)


def known_names() -> KnownNames:
    """The policies that come with the simulator, and how profiles are checked."""
    return KnownNames(
        policies=POLICIES,
        single_run=SINGLE_RUN,
        engine_limits=_engine_limits,
        profile_problem=_profile_problem,
    )


def _engine_limits(reference: str, folder: Path) -> EngineLimits:
    profile = read_profile(EngineProfile, reference, beside=folder)
    kv = profile.kv
    return EngineLimits(
        kv_tokens=kv.tokens // kv.block * kv.block,
        sequences=profile.sequences,
        batched_tokens=profile.batched_tokens,
    )


def _profile_problem(kind: ProfileKind, reference: str, folder: Path) -> str:
    """What is wrong with a profile that a scenario in the folder names; nothing if it is a good one."""
    try:
        if kind == "engine":
            read_profile(EngineProfile, reference, beside=folder)
        elif kind == "trainer":
            read_profile(TrainerProfile, reference, beside=folder)
        else:
            named_costs(reference, folder)
    except InvalidRequest as error:
        return str(error).removeprefix(f"{error.field}: ")
    return ""


@contextmanager
def task_scenario(task: SeedTask) -> Iterator[Scenario]:
    """The scenario; files that it may name are there as long as the block lasts. Raises `InvalidRequest`."""
    recorded = read_record(Path(task.recording)) if task.recording else None
    if recorded is None:
        yield read_scenario(Path(task.scenario), known_names())
    elif task.scenario:
        yield with_recorded_work(recorded, read_scenario(Path(task.scenario), known_names()), task.scenario)
    else:
        with TemporaryDirectory(prefix="ebbtide-") as folder:
            yield recorded_fleet(recorded, Path(folder), task.recording)
