"""A recorded run is simulated again: the same rollouts in the same groups, on its own fleet or on another."""

from math import inf
from pathlib import Path

import pytest
from msgspec.structs import replace

from ebbtide.checked_files import FileRefused
from ebbtide.simulator.engines.engine_profile import EngineProfile
from ebbtide.simulator.engines.profile_files import read_profile
from ebbtide.simulator.engines.trainer_profile import TrainerProfile
from ebbtide.simulator.recording.recorded_run import RecordedRun, WeightSizes
from ebbtide.simulator.recording.recorded_scenario import recorded_fleet, with_recorded_work
from ebbtide.simulator.recording.run_recorder import record_run
from ebbtide.simulator.scenario.machine_events import presences
from ebbtide.simulator.scenario.machine_pool import MachinePool
from ebbtide.simulator.scenario.scenario import Scenario
from ebbtide.simulator.scenario.training_run import TrainingRun
from ebbtide.simulator.scenario.workload import Workload
from tests.fakes.run_histories import BASE_S, ROLLOUT_S, history


@pytest.fixture
def recorded() -> RecordedRun:
    return record_run(*history())


def other(*runs: str) -> Scenario:
    return Scenario(
        name="another",
        steps=40,
        fleet=(MachinePool(name="spot", engine="an-engine", workers=3),),
        run=tuple(TrainingRun(name=run, trainer="a-trainer", prompts=64, trainer_price_per_hour=3.0) for run in runs),
    )


def lengths(scenario: Scenario, seed: int) -> list[list[list[int]]]:
    """steps -> groups -> lengths, as the simulation asks for them."""
    run = scenario.run[0]
    work = Workload(scenario, seed)
    return [
        [
            [sum(turn.response for turn in work.turns(run.name, step, prompt, sample)) for sample in range(run.group)]
            for prompt in range(run.prompts)
        ]
        for step in range(scenario.steps or 0)
    ]


def test_the_recorded_rollouts_are_the_work_whatever_the_seed_and_the_fleet(
    recorded: RecordedRun, tmp_path: Path
) -> None:
    wanted = [[[400, 400], [400, 400]], [[400, 500], [400, 400]]]
    own, another = recorded_fleet(recorded, tmp_path, "run.json"), with_recorded_work(recorded, other("x"), "o.toml")
    for scenario in (own, another):
        assert lengths(scenario, 0) == lengths(scenario, 5) == wanted
        assert scenario.run[0].max_staleness == 0
    assert (own.name, another.name) == ("math, as recorded", "another")
    assert (another.run[0].trainer, another.run[0].trainer_price_per_hour) == ("a-trainer", 3.0)
    assert another.fleet == other("x").fleet


def test_more_steps_than_were_recorded_begin_at_the_first_again(recorded: RecordedRun) -> None:
    scenario = with_recorded_work(recorded, other("x"), "o.toml")
    work = Workload(scenario, 0)
    assert work.turns("math", 3, 0, 1) == work.turns("math", 1, 0, 1)
    assert work.turns("math", 1, 2, 3) == work.turns("math", 1, 0, 1)  # a third group, and a fourth sample
    assert work.prompt_id("math", 1, 0) == 2


def test_the_fleet_comes_and_goes_as_it_did_since_the_first_rollout(recorded: RecordedRun, tmp_path: Path) -> None:
    scenario = recorded_fleet(recorded, tmp_path, "run.json")
    lost, stays = scenario.fleet
    assert (lost.name, lost.kind, lost.slots) == ("reserved-2", "reserved", 2)  # nobody listed it when it was recorded
    assert (stays.name, stays.kind, stays.slots, stays.workers, stays.trace) == ("spot-8", "spot", 8, 1, None)
    (there,) = presences(lost, scenario.tables.spots, 1000.0, seed=0)
    assert (there.begin_s, there.node, there.end_s) == (0.0, "w1", 120.0 - 11.0)
    assert (lost.boot_s, lost.notice_s) == (0.0, 0.0)


def test_profiles_have_the_measured_pace_and_are_files_as_others(recorded: RecordedRun, tmp_path: Path) -> None:
    scenario = recorded_fleet(recorded, tmp_path, "run.json")
    engine = read_profile(EngineProfile, scenario.fleet[0].engine, beside=Path(scenario.folder))
    trainer = read_profile(TrainerProfile, scenario.run[0].trainer, beside=Path(scenario.folder))
    assert engine.costs.step_s(batch=2, context=0) == pytest.approx(BASE_S + 2 * ROLLOUT_S, rel=0.1)
    assert engine.delays.install_s == 0.25
    assert engine.errors is not None
    assert engine.errors.observations > 0
    tokens = [
        prompt + length for prompt, length in zip(recorded.rollouts.prompt, recorded.rollouts.length, strict=True)
    ]
    assert trainer.step_s(tokens) == pytest.approx(2 * 2.0, rel=1e-4)  # two steps of two seconds
    assert trainer.patch_share == pytest.approx(1500 / 9000, rel=1e-4)
    first, second = recorded.steps
    publish = [one.announced_s - one.generated_s - 2.0 for one in (first, second)]
    assert trainer.publish_s() == pytest.approx(sum(publish) / 2, rel=1e-4)


def test_pulls_take_as_long_as_they_did_and_nothing_where_bytes_are_unknown(
    recorded: RecordedRun, tmp_path: Path
) -> None:
    for weights, took_s in ((recorded.weights, 1.5), (WeightSizes(), 0.0)):
        scenario = recorded_fleet(replace(recorded, weights=weights), tmp_path, "run.json")
        trainer = read_profile(TrainerProfile, scenario.run[0].trainer, beside=tmp_path)
        sent_gbit = trainer.weights_gb * trainer.patch_share * 8
        assert sent_gbit / scenario.fleet[0].link_gbps == pytest.approx(took_s, rel=1e-3)
        assert sent_gbit / scenario.run[0].publish_gbps < 0.001  # the upload is in the recorded way to the announcement


def test_a_record_without_a_measured_engine_asks_for_a_fleet(recorded: RecordedRun, tmp_path: Path) -> None:
    with pytest.raises(FileRefused, match=r"^run\.json:1: engine: .*; name a scenario whose fleet gets"):
        recorded_fleet(replace(recorded, engine=None), tmp_path, "run.json")


def with_presence(recorded: RecordedRun, present: list[tuple[float, float | None]]) -> RecordedRun:
    return replace(recorded, workers=[replace(worker, present=present) for worker in recorded.workers])


def test_a_record_without_a_whole_step_asks_for_a_trainer_and_serves_another_fleet(
    recorded: RecordedRun, tmp_path: Path
) -> None:
    bare = replace(recorded, steps=[])
    with pytest.raises(FileRefused, match=r"^run\.json:1: steps: .*; name a scenario that has one"):
        recorded_fleet(bare, tmp_path, "run.json")
    assert with_recorded_work(bare, other("x"), "o.toml").steps == 2


def test_a_recorded_fleet_is_given_up_after_ten_times_its_records_length(recorded: RecordedRun, tmp_path: Path) -> None:
    long = replace(recorded, until_s=7211.0)
    assert recorded_fleet(long, tmp_path, "run.json").hours == pytest.approx(20.0)
    assert recorded_fleet(recorded, tmp_path, "run.json").hours == 1.0  # three minutes
    assert recorded_fleet(replace(recorded, until_s=1e8), tmp_path, "run.json").hours == 1000.0


@pytest.mark.parametrize("present", [[], [(0.0, 5.0)], [(20.0, 20.0)]])
def test_a_record_whose_workers_were_never_there_asks_for_a_fleet(
    recorded: RecordedRun, tmp_path: Path, present: list[tuple[float, float | None]]
) -> None:
    with pytest.raises(FileRefused, match=r"^run\.json:1: workers: .*; name a scenario whose fleet gets"):
        recorded_fleet(with_presence(recorded, present), tmp_path, "run.json")


def test_a_worker_that_was_gone_before_the_first_rollout_is_no_part_of_the_fleet(
    recorded: RecordedRun, tmp_path: Path
) -> None:
    gone = replace(recorded.workers[0], worker="w0", slots=3, present=[(0.0, 5.0)])
    scenario = recorded_fleet(replace(recorded, workers=[gone, *recorded.workers]), tmp_path, "run.json")
    assert [pool.name for pool in scenario.fleet] == ["reserved-2", "spot-8"]


def test_a_worker_that_came_and_went_at_one_instant_was_not_there_then(recorded: RecordedRun, tmp_path: Path) -> None:
    present = [(0.0, 50.0), (50.0, 50.0), (50.0, None)]
    scenario = recorded_fleet(with_presence(recorded, present), tmp_path, "run.json")
    found = presences(scenario.fleet[0], scenario.tables.spots, 1000.0, seed=0)
    assert [(one.begin_s, one.end_s) for one in found] == [(0.0, 39.0), (39.0, inf)]


def test_a_scenario_of_several_runs_cannot_take_a_recorded_one(recorded: RecordedRun) -> None:
    with pytest.raises(FileRefused, match=r"^o\.toml:1: run: has 2 runs; .* state one"):
        with_recorded_work(recorded, other("x", "y"), "o.toml")
