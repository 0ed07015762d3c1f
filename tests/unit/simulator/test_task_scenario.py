"""What a task names becomes a scenario: a file, a recorded run, or a file's fleet with a recorded run's rollouts."""

import re
from pathlib import Path

import pytest

from ebbtide.checked_files import FileRefused
from ebbtide.errors import InvalidRequest
from ebbtide.simulator.engines.profile_files import write_profile
from ebbtide.simulator.recording.recorded_run import write_record
from ebbtide.simulator.recording.recorded_scenario import engine_of, trainer_of
from ebbtide.simulator.recording.run_recorder import record_run
from ebbtide.simulator.scenario.machine_pool import MachinePool
from ebbtide.simulator.scenario.quantity_spec import LengthSpec
from ebbtide.simulator.scenario.scenario import PolicyChoice, Scenario
from ebbtide.simulator.scenario.training_run import TrainingRun
from ebbtide.simulator.simulate import POLICIES, SeedTask, known_names, policy_of, scenario_name, task_scenario
from ebbtide.simulator.world.simulation import Simulation
from tests.fakes.run_histories import history
from tests.fakes.simulated_profiles import PlainProfiles

LENGTHS = LengthSpec(value=50)

SCENARIO = """name = "two machines"
steps = 5
[[fleet]]
name = "spot"
engine = "engine.toml"
workers = 2
[[run]]
name = "code"
trainer = "trainer.toml"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A recorded run, a scenario, and the profiles that it names."""
    recorded = record_run(*history())
    assert recorded.engine is not None
    write_record(recorded, tmp_path / "run.json")
    write_profile(engine_of(recorded, recorded.engine), tmp_path / "engine.toml")
    write_profile(trainer_of(recorded), tmp_path / "trainer.toml")
    (tmp_path / "two.toml").write_text(SCENARIO)
    return tmp_path


def test_a_file_alone_is_its_scenario(folder: Path) -> None:
    with task_scenario(SeedTask(scenario=str(folder / "two.toml"))) as scenario:
        assert (scenario.name, scenario.run[0].name, scenario.tables.known) == ("two machines", "code", {})


def test_a_recorded_run_alone_has_its_fleet_and_profiles_for_as_long_as_it_is_simulated(folder: Path) -> None:
    with task_scenario(SeedTask(scenario="", recording=str(folder / "run.json"))) as scenario:
        assert [pool.name for pool in scenario.fleet] == ["reserved-2", "spot-8"]
        profile = Path(scenario.folder) / scenario.fleet[0].engine
        assert profile.is_file()
    assert not profile.exists()


def test_a_file_with_a_recorded_run_has_the_files_fleet_and_the_runs_rollouts(folder: Path) -> None:
    task = SeedTask(scenario=str(folder / "two.toml"), recording=str(folder / "run.json"))
    assert scenario_name(task) == "two machines"
    with task_scenario(task) as scenario:
        assert (scenario.fleet[0].workers, scenario.steps, scenario.run[0].name) == (2, 2, "math")
        assert len(scenario.tables.known["math"].steps) == 2


def test_an_engine_that_is_too_small_is_refused_where_the_scenario_names_it(folder: Path) -> None:
    text = (folder / "engine.toml").read_text()
    (folder / "engine.toml").write_text(re.sub(r"(?m)^tokens = .*", "tokens = 16_000", text))
    with pytest.raises(FileRefused, match=r"two\.toml:5:10: fleet\[0\]\.engine: its kv\.tokens hold 16000 tokens"):
        scenario_name(SeedTask(scenario=str(folder / "two.toml")))


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_policies_that_refuse_a_second_run_are_known_as_such(name: str) -> None:
    runs = tuple(TrainingRun(name=run, trainer="plain", prompts=1, group=1, lengths=LENGTHS) for run in ("a", "b"))
    pool = MachinePool(name="own", engine="plain", workers=1)
    scenario = Scenario(name="two runs", steps=1, fleet=(pool,), run=runs)
    simulation = Simulation(scenario, 0, policy_of(PolicyChoice(name=name)), PlainProfiles())
    if name in known_names().single_run:
        with pytest.raises(InvalidRequest, match="knows one run"):
            simulation.run(lambda _: None)
    else:
        assert simulation.run(lambda _: None).unfinished == 0


def test_a_profile_that_is_none_is_refused_where_the_scenario_names_it(folder: Path) -> None:
    (folder / "engine.toml").write_text("name = 3\n")
    with pytest.raises(FileRefused, match=r"two\.toml:5:10: fleet\[0\]\.engine: .*name"):
        scenario_name(SeedTask(scenario=str(folder / "two.toml")))
    (folder / "two.toml").write_text(SCENARIO.replace('"trainer.toml"', '"no-such-trainer"'))
    with pytest.raises(FileRefused, match=r"two\.toml:9:11: .*run\[0\]\.trainer: names no profile; write GPU, x, "):
        scenario_name(SeedTask(scenario=str(folder / "two.toml")))
