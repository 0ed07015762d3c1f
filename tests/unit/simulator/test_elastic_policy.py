"""What a trainer does that generates between its steps and trains on groups as they are complete."""

import pytest

from benchmarks.rivals.rlboost.rlboost_policy import RLBoostPolicy
from ebbtide.simulator.engines.engine_profile import EngineDelays
from ebbtide.simulator.outcome import Outcome
from ebbtide.simulator.scenario.machine_pool import MachinePool
from ebbtide.simulator.scenario.quantity_spec import LengthSpec
from ebbtide.simulator.scenario.scenario import PlannedFault, Scenario
from ebbtide.simulator.scenario.training_run import TrainingRun
from ebbtide.simulator.world.simulation import Policy, Simulation
from ebbtide.simulator.world.training.elastic_window import ElasticPolicy
from ebbtide.simulator.world.training.step_rounds import Sample, WholeGroups
from tests.fakes.simulated_profiles import ENGINE, PlainProfiles, PlainTimes

_ENGINE = ENGINE.__class__(
    **{name: getattr(ENGINE, name) for name in ENGINE.__struct_fields__ if name not in {"delays", "sequences"}},
    sequences=16,
    delays=EngineDelays(sleep_s=0.5, wake_s=0.5),
)
_TRAINING_S_PER_TOKEN = 4e-4
_RUN = TrainingRun(
    name="math",
    trainer="plain",
    steps=5,
    prompts=16,
    group=4,
    cap=4_000,
    lengths=LengthSpec(median=600, sigma=0.7, correlation=0.8),
)


def lent(**terms: object) -> MachinePool:
    return MachinePool(name="local", kind="trainer", engine="plain", workers=2, slots=64, **terms)  # type: ignore[arg-type]


def spot(workers: int = 2) -> MachinePool:
    return MachinePool(name="spot", kind="spot", engine="plain", workers=workers, slots=64, boot_s=0.0)


def simulated(*fleet: MachinePool, policy: Policy | None = None, faults: tuple[PlannedFault, ...] = ()) -> Outcome:
    scenario = Scenario(name="test", hours=5.0, fleet=fleet, run=(_RUN,), fault=faults)
    profiles = PlainProfiles(_ENGINE, PlainTimes(token=_TRAINING_S_PER_TOKEN, publish=0.5))
    return Simulation(scenario, 0, policy or ElasticPolicy(), profiles).run(lambda _: None)


def lasted_s(outcome: Outcome) -> float:
    """All steps but the first one, in which nothing is learnt yet."""
    return outcome.steps[-1].trained_s - outcome.steps[0].trained_s


def test_every_step_is_trained_and_no_token_is_lost() -> None:
    outcome = simulated(lent(), spot())
    assert [step.step for step in outcome.steps] == [0, 1, 2, 3, 4]
    assert outcome.unfinished == outcome.tokens.lost == outcome.tokens.twice == 0
    assert outcome.tokens.moved > 0  # what was cut went on elsewhere


def test_a_planned_window_is_better_than_one_to_the_end() -> None:
    planned = simulated(lent(), spot())
    fixed = simulated(lent(), spot(), policy=ElasticPolicy(plans=False))
    assert lasted_s(planned) < 0.95 * lasted_s(fixed)


@pytest.mark.parametrize("window_s", [0.0, 3.0, 9.0])
def test_a_planned_window_is_nearly_as_good_as_any_fixed_one(window_s: float) -> None:
    """Which of the fixed ones is good is not known before."""
    planned = simulated(lent(), spot())
    fixed = simulated(lent(window_s=window_s), spot(), policy=ElasticPolicy(plans=False))
    assert lasted_s(planned) < 1.02 * lasted_s(fixed)


def test_without_engines_elsewhere_the_devices_generate_until_the_last_rollout_has_ended() -> None:
    outcome = simulated(lent())
    assert len(outcome.steps) == 5
    for step in outcome.steps:
        trainings = [span.begin_s for span in outcome.spans if span.state == "training"]
        assert not any(step.opened_s <= begin_s < step.generated_s for begin_s in trainings)


def test_the_trainer_trains_while_others_still_generate() -> None:
    whole = sum(span.end_s - span.begin_s for span in simulated(lent(), spot()).spans if span.state == "training")
    outcome = simulated(lent(), spot())
    behind = sum(step.trained_s - step.generated_s for step in outcome.steps)
    assert behind < 0.8 * whole


def test_engines_that_are_lost_in_mid_step_are_made_up_for() -> None:
    faults = (PlannedFault(kind="crash", pool="spot", step=2, at_s=8.0, machines=3, back_s=60.0),)
    outcome = simulated(lent(), spot(4), faults=faults)
    assert len(outcome.steps) == 5
    assert outcome.unfinished == 0


def test_a_rival_that_cuts_groups_to_their_shortest_response_makes_tokens_twice_and_ends_all() -> None:
    kept, cut = (
        simulated(
            lent(window_s=8.0), spot(), policy=RLBoostPolicy(adapts=False, whole_groups=True, unit_groups=unit_groups)
        )
        for unit_groups in (False, True)
    )
    assert kept.tokens.twice == 0 < cut.tokens.twice
    assert cut.unfinished == cut.tokens.lost == 0
    assert [one.tokens for one in cut.steps] == [one.tokens for one in kept.steps]


def test_spot_machines_that_do_not_make_steps_shorter_are_given_back() -> None:
    kept, given = (simulated(lent(), spot(12), policy=ElasticPolicy(releases=releases)) for releases in (False, True))
    paid_s = [sum(pool.machine_s for pool in one.pools if pool.pool == "spot") for one in (kept, given)]
    assert paid_s[1] < 0.95 * paid_s[0]
    assert lasted_s(given) < 1.03 * lasted_s(kept)
    assert given.unfinished == given.tokens.lost == 0


def test_a_sample_is_trained_on_once_its_whole_group_has_ended() -> None:
    step = WholeGroups(prompts=2, group=2, together=True).open(0)
    first, second, third, fourth = step.begin()
    assert step.ended(first).trainable == ()
    assert step.ended(third).trainable == ()
    assert step.ended(second).trainable == [first, second]
    last = step.ended(fourth)
    assert last.complete
    assert last.trainable == [Sample(1, 0), Sample(1, 1)]
