"""Reads what a simulation is asked of, and simulates it under the policy and with the profiles that it names."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, cast

import msgspec
from msgspec import Struct

from ebbtide.errors import InvalidRequest
from ebbtide.simulator.engines.engine_profile import EngineProfile
from ebbtide.simulator.engines.profile_files import read_profile
from ebbtide.simulator.engines.trainer_profile import TrainerProfile
from ebbtide.simulator.outcome import Outcome
from ebbtide.simulator.recording.recorded_run import read_record
from ebbtide.simulator.recording.recorded_scenario import recorded_fleet, with_recorded_work
from ebbtide.simulator.scenario.scenario import PolicyChoice, Scenario
from ebbtide.simulator.scenario.scenario_checks import EngineLimits, KnownNames, ProfileKind, unknown_policy
from ebbtide.simulator.scenario.scenario_reader import read_scenario
from ebbtide.simulator.world.ebbtide_policy import EbbtidePolicy
from ebbtide.simulator.world.rival_policies import RestartPolicy, VerlPolicy
from ebbtide.simulator.world.simulation import NamedProfiles, Policy, Say, Simulation
from ebbtide.simulator.world.training.elastic_window import ElasticPolicy

#: By the name that a scenario's `[policy]` gives. Each is a record of its parameters.
POLICIES: Final[Mapping[str, type[Struct]]] = {
    "ebbtide": EbbtidePolicy,
    "elastic": ElasticPolicy,
    "restart": RestartPolicy,
    "verl": VerlPolicy,
}
#: Policies with a dispatch of their own. It refuses a second run when the simulation meets it.
SINGLE_RUN: Final = frozenset({"verl"})


def policy_of(choice: PolicyChoice, policies: Mapping[str, type[Struct]] = POLICIES) -> Policy:
    """Make the policy that a scenario names. Raises `InvalidRequest` for unknown names and wrong parameters."""
    if choice.name not in policies:
        raise InvalidRequest(unknown_policy(choice.name, policies), field="policy.name")
    try:
        return cast("Policy", msgspec.convert(choice.params, policies[choice.name]))
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{error}; correct or remove it", field="policy.params") from None


def simulate(scenario: Scenario, *, seed: int, say: Say = lambda _: None) -> Outcome:
    """Simulate a scenario with a seed. The same two give the same outcome. `say` hears of progress.

    Raises `InvalidRequest` for profiles that cannot be read, and for work that no worker can do.
    """
    return Simulation(scenario, seed, policy_of(scenario.policy), NamedProfiles(scenario.folder)).run(say)


class SeedTask(Struct, frozen=True, kw_only=True):
    """One seed of what `ebbtide simulate` was asked: a scenario file, a recorded run, or the file's fleet with the
    recorded run's rollouts. Paths are as the user wrote them, for error messages.
    """

    scenario: str  # path of a scenario file; "": the recorded fleet
    recording: str = ""  # path of a recorded run, whose rollouts take the place of the scenario's; "": none
    seed: int = 0
    spans: bool = False  # whether the outcome is to have what each machine did: it is large


def simulate_task(task: SeedTask, say: Say) -> Outcome:
    """Simulate the task's scenario. Raises `InvalidRequest` for faulty input."""
    with task_scenario(task) as scenario:
        return simulate(scenario, seed=task.seed, say=say)


def scenario_name(task: SeedTask) -> str:
    """Read everything that the task names, and return its scenario's name. Raises `InvalidRequest`."""
    with task_scenario(task) as scenario:
        return scenario.name


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
        else:
            read_profile(TrainerProfile, reference, beside=folder)
    except InvalidRequest as error:
        return error.text
    return ""
