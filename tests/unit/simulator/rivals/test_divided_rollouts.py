"""Policies that divide rollouts: they lose nothing, never lack memory, and start what they say first."""

from functools import partial

import pytest
from msgspec.structs import replace

from benchmarks.rivals.tail.chunk_places import ChunkPlace, chunk_place
from benchmarks.rivals.tail.seer_policy import SeerPolicy
from ebbtide.simulator.engines.engine_profile import EngineProfile, KvCapacity, StepCosts
from ebbtide.simulator.outcome import Outcome
from ebbtide.simulator.scenario.machine_pool import MachinePool
from ebbtide.simulator.scenario.quantity_spec import LengthSpec, QuantitySpec
from ebbtide.simulator.scenario.scenario import Scenario
from ebbtide.simulator.scenario.training_run import TrainingRun
from ebbtide.simulator.world.rival_policies import VerlPolicy
from ebbtide.simulator.world.simulation import Policy, Simulation
from tests.fakes.simulated_profiles import ENGINE, PlainProfiles

CROWDED: EngineProfile = replace(
    ENGINE, costs=StepCosts(base_s=0.01, context_s=2e-7, token_s=1e-5), kv=KvCapacity(tokens=60_000), sequences=64
)
LOCAL = MachinePool(name="local", kind="trainer", engine="plain", workers=3, slots=4096, run="math")
RUN = TrainingRun(
    name="math",
    trainer="plain",
    steps=1,
    prompts=48,
    group=8,
    cap=8000,
    prompt_tokens=QuantitySpec(value=100),
    lengths=LengthSpec(mean=1500, median=1.0, sigma=1.2, correlation=0.9),
)
SEER = partial(SeerPolicy, chunk=1000)


def simulated(policy: Policy, *, seed: int = 0) -> Outcome:
    scenario = Scenario(name="test", hours=10.0, fleet=(LOCAL,), run=(RUN,))
    return Simulation(scenario, seed, policy, PlainProfiles(CROWDED)).run(lambda _: None)


def seconds(outcome: Outcome) -> float:
    (step,) = outcome.steps
    return step.generated_s - step.opened_s


@pytest.mark.parametrize(
    "policy",
    [SEER(), SEER(order="queue"), SEER(speculates=False)],
    ids=repr,
)
def test_no_token_is_regenerated_and_no_engine_lacks_memory(policy: Policy) -> None:
    outcome, verl = simulated(policy), simulated(VerlPolicy())
    assert outcome.tokens.generated == outcome.tokens.kept == outcome.steps[0].tokens == verl.steps[0].tokens
    assert verl.preemptions > 50
    assert outcome.preemptions <= verl.preemptions // 100
    assert outcome.unfinished == 0


def test_a_pool_saves_reading_what_goes_on_elsewhere() -> None:
    with_pool, without = (simulated(SEER(speculates=False, pool_tokens_per_s=speed)) for speed in (1e6, 0.0))
    assert without.tokens.reread > 10 * with_pool.tokens.reread
    assert without.tokens.generated == with_pool.tokens.generated


def test_context_shortens_the_tail_and_true_lengths_nearly_end_it() -> None:
    told, context, queue = (
        simulated(SEER(order=order, speculates=False)).steps[0].tail_s for order in ("true_lengths", "context", "queue")
    )
    assert told < context < queue


def test_a_step_after_another_begins_as_soon_as_it_is_there() -> None:
    scenario = Scenario(name="test", hours=10.0, fleet=(LOCAL,), run=(replace(RUN, steps=2, prompts=8),))
    outcome = Simulation(scenario, 0, SEER(), PlainProfiles(CROWDED)).run(lambda _: None)
    first, second = outcome.steps
    assert second.generated_s - second.opened_s < 2 * (first.generated_s - first.opened_s)


def test_drafts_make_a_step_shorter_and_dear_verification_less_so() -> None:
    without, dear, cheap = (
        seconds(simulated(policy)) for policy in (SEER(speculates=False), SEER(verification=20.0), SEER())
    )
    assert cheap < dear < 1.01 * without


def test_a_chunk_goes_home_while_engines_are_even_and_to_the_emptiest_otherwise() -> None:
    def places(busiest: int) -> list[ChunkPlace]:
        return [
            ChunkPlace(session_id="a", running=busiest, slots=100, free=500),
            ChunkPlace(session_id="b", running=10, slots=100, free=500),
            ChunkPlace(session_id="full", running=0, slots=100, free=5),
        ]

    def home(busiest: int, tokens: int = 100) -> str | None:
        place = chunk_place(places(busiest), tokens, "a")
        return place.session_id if place else None

    assert home(32) == "a"
    assert home(33) == "b"
    assert home(32, tokens=501) is None
