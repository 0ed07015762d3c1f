"""What a simulated fleet does: the same work whatever befalls it, nothing made twice but what was not stored."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from ebbtide.errors import InvalidRequest
from ebbtide.simulator.engines.engine_profile import EngineDelays, EngineProfile
from ebbtide.simulator.outcome import Outcome, PoolOutcome, StepOutcome
from ebbtide.simulator.scenario.input_tables import GrantTape, InputTables
from ebbtide.simulator.scenario.machine_pool import GrantTapeSpec, MachinePool
from ebbtide.simulator.scenario.quantity_spec import LengthSpec, QuantitySpec
from ebbtide.simulator.scenario.scenario import PlannedFault, Scenario
from ebbtide.simulator.scenario.training_run import SimulatedEnvironment, TrainingRun
from ebbtide.simulator.world.ebbtide_policy import EbbtidePolicy
from ebbtide.simulator.world.simulation import Simulation
from ebbtide.types.run import ShareSpec
from tests.fakes.simulated_profiles import ENGINE, INSTALL_S, STEP_S, PlainProfiles, PlainTimes

SPREAD = LengthSpec(median=300, sigma=0.8, most=4000)


def pool(workers: int = 4, **terms: object) -> MachinePool:
    given = {"name": "spot", "kind": "spot", "engine": "plain", "workers": workers, "slots": 8, "boot_s": 10.0} | terms
    return msgspec.convert(given, MachinePool)


def training(**terms: object) -> TrainingRun:
    given = {"name": "math", "trainer": "plain", "prompts": 8, "group": 4, "cap": 4000, "steps": 3} | terms
    lengths = given.pop("lengths", SPREAD)
    around = given.pop("environment", SimulatedEnvironment())
    return msgspec.structs.replace(msgspec.convert(given, TrainingRun), lengths=lengths, environment=around)


def simulated(
    *,
    seed: int = 0,
    hours: float = 1.0,
    times: PlainTimes | None = None,
    engine: EngineProfile = ENGINE,
    policy: EbbtidePolicy = EbbtidePolicy(),  # noqa: B008 - a frozen record
    **parts: object,
) -> Outcome:
    given = {"name": "test", "hours": hours, "fleet": (pool(),), "run": (training(),)} | parts
    return Simulation(Scenario(**given), seed, policy, PlainProfiles(engine, times)).run(lambda _: None)  # type: ignore[arg-type]


def pool_of(outcome: Outcome, name: str = "spot") -> PoolOutcome:
    return next(one for one in outcome.pools if one.pool == name)


def test_one_rollout_takes_its_tokens_times_the_engines_step() -> None:
    lengths = LengthSpec(value=500)
    outcome = simulated(fleet=(pool(1),), run=(training(prompts=1, group=1, steps=1, lengths=lengths),))
    (step,) = outcome.steps
    assert outcome.tokens.generated == outcome.tokens.kept == step.tokens == 500
    ready = 10.0 + 1.0 / 6.25 + INSTALL_S  # boot, pull of a gigabyte over 50 Gbit/s, install
    assert step.generated_s == pytest.approx(ready + 500 * STEP_S, abs=0.2)
    assert step.trained_s == pytest.approx(step.generated_s + 2.0)


def test_steps_follow_one_another_as_versions_are_announced() -> None:
    outcome = simulated()
    assert [step.step for step in outcome.steps] == [0, 1, 2]
    for before, after in zip(outcome.steps, outcome.steps[1:], strict=False):
        assert after.opened_s == pytest.approx(before.trained_s + 3.0)
    assert outcome.unfinished == 0


def test_generation_runs_ahead_by_the_staleness_that_the_run_allows() -> None:
    outcome = simulated(run=(training(max_staleness=1, steps=4),))
    first, second = outcome.steps[:2]
    assert second.opened_s == first.opened_s
    assert outcome.simulated_s < simulated(run=(training(steps=4),)).simulated_s


def test_groups_that_go_on_shorten_steps_and_no_response_is_regenerated_or_dropped() -> None:
    run = training(max_staleness=3, steps=6, lengths=LengthSpec(median=200, sigma=1.2, most=4000))
    rounds = EbbtidePolicy(rounds_of_steps="whole_groups")
    found = simulated(run=(run,), policy=rounds)
    waiting = simulated(run=(msgspec.structs.replace(run, max_staleness=0),))
    assert [step.step for step in found.steps] == list(range(6))
    assert sum(step.rollouts for step in found.steps) == 6 * run.rollouts_per_step
    assert found.tokens.generated == found.tokens.kept == waiting.tokens.kept
    assert found.unfinished == found.tokens.dropped == 0
    assert found.simulated_s < 0.9 * waiting.simulated_s


def test_groups_that_go_on_survive_the_loss_of_their_workers() -> None:
    run = training(max_staleness=2, steps=4)
    faults = [PlannedFault(kind="kill", step=step, at_s=4.0, machines=2, back_s=5.0) for step in range(3)]
    found = simulated(run=(run,), policy=EbbtidePolicy(rounds_of_steps="whole_groups"), fault=tuple(faults))
    assert len(found.steps) == 4
    assert found.tokens.kept == simulated(run=(run,)).tokens.kept
    assert found.unfinished == 0


def test_groups_cannot_go_on_in_a_run_that_is_strictly_on_policy() -> None:
    with pytest.raises(InvalidRequest, match="at least 1") as refused:
        simulated(policy=EbbtidePolicy(rounds_of_steps="whole_groups"))
    assert refused.value.field == "run.max_staleness"


def test_every_token_that_was_sampled_is_kept_or_was_lost_before_it_was_stored() -> None:
    faults = [PlannedFault(kind="kill", step=step, at_s=6.0, machines=2, back_s=5.0) for step in range(3)]
    outcome = simulated(fault=tuple(faults))
    tokens = outcome.tokens
    assert pool_of(outcome).losses == 6
    assert tokens.generated == tokens.kept + tokens.lost
    assert 0 < tokens.twice == tokens.lost <= 6 * 8 * 32
    assert tokens.moved > 0
    assert tokens.kept == simulated().tokens.kept


def test_a_notice_lets_a_worker_hand_over_everything() -> None:
    fault = PlannedFault(kind="drain", step=1, at_s=6.0, machines=3, for_s=20.0, back_s=30.0)
    outcome = simulated(fault=(fault,))
    assert (pool_of(outcome).drains, pool_of(outcome).losses) == (3, 0)
    assert outcome.tokens.lost == 0
    assert outcome.tokens.moved > 0


def test_a_frozen_worker_is_given_up_and_what_it_wakes_with_is_over() -> None:
    outcome = simulated(fault=(PlannedFault(kind="freeze", step=0, at_s=12.0, machines=1, for_s=30.0),))
    assert outcome.resumes > 0
    assert outcome.tokens.generated == outcome.tokens.kept + outcome.tokens.lost


def test_a_slow_worker_loses_rollouts_to_faster_ones() -> None:
    fault = PlannedFault(kind="slow", at_s=0.0, machines=1, for_s=3600.0, speed=0.1)
    slow = simulated(fault=(msgspec.structs.replace(fault, at_s=11.0),), run=(training(steps=6),))
    assert slow.moves > 0


def test_a_fleet_of_zero_for_hours_is_waited_for(tmp_path: Path) -> None:
    late = pool(2, from_s=7200.0)
    outcome = simulated(hours=3.0, fleet=(late,), run=(training(steps=1),))
    assert outcome.steps[0].generated_s > 7200.0
    none = simulated(hours=1.0, fleet=(late,))
    assert (none.steps, none.tokens.generated, none.unfinished) == ([], 0, 32)


def test_a_trainer_that_dies_learns_again_what_its_checkpoint_lacks() -> None:
    times = PlainTimes(token=0.001)
    whole = simulated(times=times)
    fault = PlannedFault(kind="trainer", step=2, at_s=5.0, for_s=60.0)
    broken = simulated(times=times, fault=(fault,))
    assert [one.tokens for one in broken.steps] == [one.tokens for one in whole.steps]
    assert broken.simulated_s > whole.simulated_s + 30.0


def test_episodes_take_their_turns_with_waits_between() -> None:
    around = SimulatedEnvironment(
        turns=QuantitySpec(value=3), adds_tokens=QuantitySpec(value=50), wait_s=QuantitySpec(value=7)
    )
    run = training(prompts=1, group=1, steps=1, lengths=LengthSpec(value=100), environment=around)
    (step,) = simulated(fleet=(pool(1),), run=(run,)).steps
    assert step.tokens == 300
    assert step.generated_s - step.opened_s > 3 * 100 * STEP_S + 2 * 7


def scored(**rewards: object) -> StepOutcome:
    """A step of 8 responses, each of which takes 10 s to score."""
    around = SimulatedEnvironment(reward_s=QuantitySpec(value=10))
    run = training(prompts=4, group=2, steps=1, environment=around, rewards=rewards)
    (step,) = simulated(fleet=(pool(1),), run=(run,)).steps
    return step


def test_scorings_beside_the_rollout_end_sooner_than_those_behind_it_and_few_scorers_are_waited_for() -> None:
    beside, after, few = scored(), scored(when="after"), scored(when="after", scorers=2)
    assert beside.generated_s <= after.generated_s
    assert few.generated_s == pytest.approx(after.generated_s + 30.0)


def test_a_scoring_ends_with_its_timeout() -> None:
    assert scored(timeout_s=4.0).generated_s == pytest.approx(scored().generated_s - 6.0)


def test_two_runs_share_the_fleet() -> None:
    runs = (training(name="one"), training(name="two"))
    outcome = simulated(run=runs)
    assert {step.run for step in outcome.steps} == {"one", "two"}
    assert all(sum(step.run == name for step in outcome.steps) == 3 for name in ("one", "two"))


def test_workers_that_the_tail_of_one_runs_step_does_not_need_help_the_other_run_at_once() -> None:
    """Of the first run's 24 rollouts three last ten times as long as the others."""
    tail = LengthSpec(median=300, sigma=0.1, endless=0.05, most=4000)
    first = training(name="first", prompts=6, lengths=tail, steps=1)
    other = training(name="other", prompts=120, lengths=LengthSpec(value=400), steps=1)
    shared = simulated(fleet=(pool(4),), run=(first, other))
    half = ShareSpec(ceiling=0.5)
    apart = simulated(
        fleet=(pool(4),),
        run=tuple(msgspec.structs.replace(one, share=half) for one in (first, other)),
    )

    def ended(outcome: Outcome, run: str) -> float:
        return next(step.generated_s for step in outcome.steps if step.run == run)

    assert ended(shared, "other") < 0.8 * ended(apart, "other")
    assert ended(shared, "first") < 1.05 * ended(apart, "first")


def test_a_trainers_devices_generate_between_its_steps() -> None:
    lent = pool(2, name="lent", kind="trainer", run="math", boot_s=0.0)
    outcome = simulated(fleet=(lent,))
    assert [step.step for step in outcome.steps] == [0, 1, 2]
    assert pool_of(outcome, "lent").busy_s > 0
    assert outcome.tokens.lost == 0


def test_rollouts_go_elsewhere_when_a_trainers_window_ends() -> None:
    lent = pool(2, name="lent", kind="trainer", run="math", boot_s=0.0, window_s=8.0)
    outcome = simulated(fleet=(lent, pool(1)))
    assert len(outcome.steps) == 3
    assert outcome.tokens.lost == 0
    assert outcome.tokens.moved > 0


@pytest.mark.parametrize("hashes", ["1", "2"])
def test_the_same_seed_gives_the_same_bytes_in_any_process(hashes: str) -> None:
    script = (
        "import sys, msgspec; from tests.unit.simulator.test_world import lossy; "
        "sys.stdout.buffer.write(msgspec.json.encode(lossy()))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": hashes, "PYTHONPATH": os.pathsep.join(sys.path)}
    said = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=True).stdout
    assert said.splitlines()[-1] == msgspec.json.encode(lossy())
    assert msgspec.json.encode(lossy(seed=1)) != msgspec.json.encode(lossy())


def lossy(seed: int = 0) -> Outcome:
    """A fleet that loses machines often, with a notice for some."""
    fleet = pool(4, losses_per_hour=20.0, replaced_s=10.0, notice_s=5.0, unannounced=0.5, speed_spread=0.3)
    return simulated(seed=seed, fleet=(fleet,), run=(training(steps=4, max_staleness=1),))


def test_a_borrowed_worker_makes_tokens_only_when_its_hosts_users_leave_it_time() -> None:
    lent = GrantTape((0.0, 1.0, 1.5), (0.5, 0.0, 0.25), 2.0)
    tables = InputTables(grants={"grants.csv": lent})
    borrowed = pool(2, name="lent", kind="borrowed", grants=GrantTapeSpec(file="grants.csv"))
    outcome = simulated(fleet=(borrowed,), run=(training(steps=2),), tables=tables)
    assert len(outcome.steps) == 2
    (there,) = [one for one in outcome.pools if one.pool == "lent"]
    assert there.held_s == pytest.approx(0.25 * there.machine_s, rel=0.3)
    own = simulated(fleet=(pool(2),), run=(training(steps=2),))
    assert outcome.simulated_s > 1.5 * own.simulated_s


@pytest.mark.parametrize("at_s", [0.0, 0.5])
def test_a_worker_that_is_frozen_when_a_version_comes_installs_it_once_it_thaws(at_s: float) -> None:
    fault = PlannedFault(kind="freeze", step=1, at_s=at_s, machines=1, for_s=2.0)
    outcome = simulated(fleet=(pool(1),), fault=(fault,))
    assert len(outcome.steps) == 3


def test_a_worker_that_gets_its_notice_while_it_is_frozen_hands_over_once_it_thaws() -> None:
    frozen = PlannedFault(kind="freeze", step=1, at_s=4.0, machines=1, for_s=2.0)
    drained = PlannedFault(kind="drain", step=1, at_s=5.0, machines=1, for_s=20.0, back_s=0.0)
    outcome = simulated(fleet=(pool(1),), fault=(frozen, drained))
    assert (pool_of(outcome).drains, pool_of(outcome).losses, outcome.tokens.lost) == (1, 0, 0)


@pytest.mark.parametrize("seed", range(4))
def test_accounts_of_tokens_add_up_whatever_befalls_a_fleet(seed: int) -> None:
    fleet = pool(4, losses_per_hour=60.0, stalls_per_hour=60.0, stall_s=5.0, replaced_s=5.0)
    tokens = simulated(seed=seed, fleet=(fleet,)).tokens
    assert tokens.generated == tokens.kept + tokens.lost + tokens.dropped
    assert tokens.twice == tokens.lost


def test_the_window_of_the_only_runs_trainer_needs_no_name_of_the_run() -> None:
    named = pool(2, name="lent", kind="trainer", run="math", boot_s=0.0, window_s=8.0)
    unnamed = pool(2, name="lent", kind="trainer", boot_s=0.0, window_s=8.0)
    busy = [pool_of(simulated(fleet=(one, pool(1))), "lent").busy_s for one in (named, unnamed)]
    assert busy[0] == busy[1]


def test_a_checkpoint_that_takes_no_time_is_one() -> None:
    times = PlainTimes(token=0.001, checkpoint=0.0)
    fault = PlannedFault(kind="trainer", step=5, at_s=2.0, for_s=10.0)
    plain = simulated(times=times, run=(training(steps=6),))
    broken = simulated(times=times, run=(training(steps=6),), fault=(fault,))
    assert broken.simulated_s - plain.simulated_s < 15.0


def test_a_version_is_announced_before_the_next_is_published() -> None:
    slow = PlainTimes(publish=200.0)
    outcome = simulated(times=slow, run=(training(steps=4, max_staleness=3),))
    assert outcome.steps[-1].trained_s > 2 * 200.0  # the third version waits for the second, and that for the first


def test_a_crash_is_noticed_sooner_than_a_silent_loss() -> None:
    ends = []
    for kind in ("crash", "kill"):
        fault = msgspec.convert({"kind": kind, "step": 1, "at_s": 4.0, "machines": 2}, PlannedFault)
        ends.append(simulated(fault=(fault,)).steps[1].generated_s)
    assert ends[0] < ends[1]


def test_a_worker_that_is_given_up_as_stuck_attaches_again_and_goes_on() -> None:
    fault = PlannedFault(kind="slow", at_s=15.0, machines=1, for_s=100.0, speed=0.0001)
    outcome = simulated(fleet=(pool(1),), fault=(fault,))
    assert len(outcome.steps) == 3
    assert outcome.simulated_s < 600.0


def test_a_slow_time_ends_when_it_is_over_also_in_the_middle_of_a_step() -> None:
    fault = PlannedFault(kind="slow", at_s=15.0, machines=1, for_s=30.0, speed=0.001)
    plain = simulated(fleet=(pool(1),), run=(training(steps=1),))
    slowed = simulated(fleet=(pool(1),), run=(training(steps=1),), fault=(fault,))
    assert slowed.steps[0].generated_s - plain.steps[0].generated_s == pytest.approx(30.0, abs=1.0)


def test_a_trainer_cannot_die_before_its_run_begins() -> None:
    fault = PlannedFault(kind="trainer", at_s=20.0, for_s=10.0)
    late = training(start_s=60.0, steps=1)
    assert simulated(run=(late,), fault=(fault,)).steps == simulated(run=(late,)).steps


def test_a_machine_that_is_to_be_taken_before_it_has_booted_gets_no_work() -> None:
    fault = PlannedFault(kind="drain", at_s=5.0, machines=1, for_s=60.0, back_s=0.0)
    outcome = simulated(fleet=(pool(1),), fault=(fault,))
    assert (pool_of(outcome).drains, outcome.tokens.lost) == (1, 0)
    assert outcome.steps[0].generated_s > 65.0


def test_a_machine_that_is_struck_twice_is_replaced_once() -> None:
    twice = tuple(PlannedFault(kind="drain", at_s=20.0, machines=1, for_s=10.0, back_s=5.0) for _ in range(2))
    outcome = simulated(fleet=(pool(1),), fault=twice, run=(training(steps=6),))
    assert max(count for _, name, count in outcome.fleet if name == "spot") == 1


def test_replacements_leave_with_their_pool() -> None:
    ends = pool(1, until_s=60.0)
    fault = PlannedFault(kind="kill", at_s=30.0, machines=1, back_s=5.0)
    outcome = simulated(fleet=(ends,), fault=(fault,), hours=0.1)
    assert pool_of(outcome).machine_s == pytest.approx(55.0)


def test_an_engines_start_comes_behind_its_machines_boot_and_a_lent_one_wakes_and_sleeps() -> None:
    slow = msgspec.structs.replace(ENGINE, delays=EngineDelays(install_s=INSTALL_S, start_s=20.0))
    run = training(prompts=1, group=1, steps=1, lengths=LengthSpec(value=100))
    starts = [simulated(engine=one, fleet=(pool(1),), run=(run,)).steps[0].generated_s for one in (ENGINE, slow)]
    assert starts[1] - starts[0] == pytest.approx(20.0, abs=0.3)
    drowsy = msgspec.structs.replace(ENGINE, delays=EngineDelays(install_s=INSTALL_S, wake_s=3.0, sleep_s=2.0))
    lent = pool(2, name="lent", kind="trainer", boot_s=0.0)
    ends = [simulated(engine=one, fleet=(lent,)).simulated_s for one in (ENGINE, drowsy)]
    # Only the first waking shows: later ones end while versions are published. Each step waits until engines sleep.
    assert ends[1] - ends[0] == pytest.approx(3.0 + 3 * 2.0, abs=0.5)
