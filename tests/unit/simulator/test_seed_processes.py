"""Seeds are simulated in processes of their own: in order, so many at a time, and none is left behind."""

import pytest
from msgspec.structs import replace

from ebbtide.errors import EbbtideError, InvalidRequest
from ebbtide.simulator.outcome import Outcome, SimulationProgress
from ebbtide.simulator.seed_processes import simulate_seeds
from ebbtide.simulator.simulate import SeedTask
from tests.fakes import stub_simulation
from tests.fakes.simulated_outcomes import outcome


def simulated(*tasks: SeedTask, jobs: int = 2) -> tuple[list[Outcome], list[tuple[int, SimulationProgress]]]:
    told: list[tuple[int, SimulationProgress]] = []
    outcomes = simulate_seeds(
        tasks,
        jobs=jobs,
        say=lambda number, progress: told.append((number, progress)),
        simulate=stub_simulation.simulate,
    )
    return outcomes, told


def test_outcomes_come_in_the_order_of_the_tasks_and_progress_names_its_task() -> None:
    outcomes, told = simulated(*(SeedTask(scenario="steps", seed=seed, spans=seed == 3) for seed in (3, 1, 2)))
    whole = [outcome(seed, scenario="steps", slower=1.0 + seed) for seed in (3, 1, 2)]
    assert outcomes == [whole[0], *(replace(one, spans=[]) for one in whole[1:])]
    assert {number for number, _ in told} == {0, 1, 2}
    assert {progress.share for _, progress in told} == {0.25}


def test_a_talkative_simulation_is_heard_seldom_and_what_it_prints_goes_to_stderr(
    capfd: pytest.CaptureFixture[str],
) -> None:
    (only,), told = simulated(SeedTask(scenario="chatty"))
    assert capfd.readouterr() == ("", "a library prints this to stdout\n")
    assert only.seed == 0
    assert 1 <= len(told) < 1000


def test_refused_input_is_refused_with_its_own_words_and_the_others_end() -> None:
    with pytest.raises(InvalidRequest, match=r"^x\.toml:3:1: must be above 0; write 1 or more$"):
        simulated(SeedTask(scenario="refused"), SeedTask(scenario="steps"))


@pytest.mark.parametrize(("scenario", "status"), [("crash", 7), ("fault", 1)])
def test_a_process_that_fails_is_named_with_its_seed_and_status_among_others(
    capfd: pytest.CaptureFixture[str], scenario: str, status: int
) -> None:
    told = f"{scenario} with seed 5 ended with status {status} and without an outcome"
    with pytest.raises(EbbtideError, match=told):
        simulated(SeedTask(scenario="steps"), SeedTask(scenario=scenario, seed=5), SeedTask(scenario="steps", seed=6))
    assert ("ZeroDivisionError: a defect of the simulator" in capfd.readouterr().err) == (scenario == "fault")
