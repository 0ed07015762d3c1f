"""Policies that scenarios name, and what whole simulations do under them."""

from collections import Counter

import pytest
from msgspec.structs import replace

from benchmarks.rivals.policies import COMPARED
from ebbtide.errors import InvalidRequest
from ebbtide.simulator.outcome import Outcome
from ebbtide.simulator.scenario.machine_pool import MachinePool
from ebbtide.simulator.scenario.quantity_spec import LengthSpec
from ebbtide.simulator.scenario.scenario import PlannedFault, PolicyChoice, Scenario
from ebbtide.simulator.scenario.training_run import TrainingRun
from ebbtide.simulator.simulate import POLICIES, policy_of
from ebbtide.simulator.world.simulation import Simulation
from tests.fakes.simulated_profiles import PlainProfiles, PlainTimes

SPOT = MachinePool(name="spot", kind="spot", engine="plain", workers=3, slots=8, boot_s=1.0)
LOCAL = MachinePool(name="local", kind="trainer", engine="plain", workers=2, slots=64, run="math")
RUN = TrainingRun(
    name="math",
    trainer="plain",
    steps=2,
    prompts=4,
    group=4,
    cap=2000,
    lengths=LengthSpec(median=300, sigma=0.8, most=2000),
)
KILL = PlannedFault(kind="kill", pool="spot", step=1, at_s=4.0)


def simulated(
    name: str, *fleet: MachinePool, faults: tuple[PlannedFault, ...] = (), **params: bool | int | float | str
) -> Outcome:
    policy = policy_of(PolicyChoice(name=name, params=params), COMPARED)
    scenario = Scenario(name="test", hours=1.0, fleet=fleet, run=(RUN,), fault=faults)
    return Simulation(scenario, 0, policy, PlainProfiles(times=PlainTimes(token=1e-3))).run(lambda _: None)


@pytest.mark.parametrize("name", sorted(COMPARED))
def test_every_policy_trains_all_steps_without_parameters(name: str) -> None:
    fleet = (LOCAL,) if name in {"verl", "rollpacker"} else (SPOT,)
    outcome = simulated(name, *fleet)
    assert [step.step for step in outcome.steps] == [0, 1]
    assert outcome.unfinished == 0


def test_unknown_policies_and_parameters_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"no policy 'rlboost'; known are ebbtide, .*the repository's benchmarks"):
        policy_of(PolicyChoice(name="rlboost"))
    with pytest.raises(InvalidRequest, match="pending"):
        policy_of(PolicyChoice(name="rlboost", params={"pending": 3}), COMPARED)
    with pytest.raises(InvalidRequest, match="windows"):
        policy_of(PolicyChoice(name="rlboost", params={"windows": "346,212"}), COMPARED)


@pytest.mark.parametrize("name", sorted(COMPARED.keys() - POLICIES.keys() - {"ablated"}))
def test_rivals_know_one_run(name: str) -> None:
    runs = (RUN, replace(RUN, name="code"))
    scenario = Scenario(name="two runs", fleet=(SPOT,), run=runs)
    simulation = Simulation(scenario, 0, policy_of(PolicyChoice(name=name), COMPARED), PlainProfiles())
    with pytest.raises(InvalidRequest, match="knows one run"):
        simulation.run(lambda _: None)


def test_verl_generates_on_the_trainers_devices_and_moves_nothing() -> None:
    outcome = simulated("verl", LOCAL)
    assert outcome.tokens.moved == outcome.tokens.lost == 0
    states = Counter(span.state for span in outcome.spans if span.pool == "math trainer")
    assert states["training"] == 2


def test_restart_makes_lost_tokens_twice_and_ebbtide_only_those_that_were_not_stored() -> None:
    again, kept = simulated("restart", SPOT, faults=(KILL,)), simulated("ebbtide", SPOT, faults=(KILL,))
    assert again.tokens.twice > 10 * kept.tokens.twice
    assert again.tokens.kept == kept.tokens.kept


def test_rlboost_trains_while_remote_engines_still_generate() -> None:
    outcome = simulated("rlboost", SPOT, LOCAL, initial_window_s=2.0, adapts=True, micro_batch=4)
    step = outcome.steps[1]
    begins = [span.begin_s for span in outcome.spans if span.state == "training" and span.begin_s > step.opened_s]
    assert begins[0] < step.generated_s


def test_rlboosts_trainer_waits_for_as_many_responses_as_a_micro_batch_has() -> None:
    whole = simulated("rlboost", SPOT, LOCAL, initial_window_s=2.0, micro_batch=16)  # as many as a step has
    for step in whole.steps:
        begins = [span.begin_s for span in whole.spans if span.state == "training" and span.begin_s > step.opened_s]
        assert begins[0] >= step.generated_s


def test_rlboost_keeps_tokens_of_lost_engines_unless_it_does_not_migrate() -> None:
    kept = simulated("rlboost", SPOT, faults=(KILL,), migrates=True)
    again = simulated("rlboost", SPOT, faults=(KILL,), migrates=False)
    assert again.tokens.twice > kept.tokens.twice
    assert again.steps[1].trained_s > kept.steps[1].trained_s
