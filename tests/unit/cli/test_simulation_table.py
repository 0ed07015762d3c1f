"""Simulated scenarios side by side: medians, spreads, ratios to the first, and what does not exist."""

import io
import re
import time

import pytest
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from ebbtide.lab_commands.simulation import SimulationScreen, print_simulation, progress_text, simulation_table
from ebbtide.simulator.outcome import SimulationProgress
from ebbtide.simulator.scenario_figures import figures
from tests.fakes.simulated_outcomes import empty_outcome, outcome


def rows(table: Table) -> dict[str, list[str]]:
    """label -> cells, as printed on a wide screen."""
    console = Console(file=io.StringIO(), width=400)
    console.print(table)
    printed = console.file.getvalue().splitlines()[1:]  # type: ignore[attr-defined]
    split = [re.split(r"  +", line.strip()) for line in printed]
    return {cells[0]: cells[1:] for cells in split}


def test_scenarios_stand_side_by_side_with_ratios_to_the_first() -> None:
    first = figures([outcome()])
    other = figures([outcome(slower=2.0, scenario="reserved")])
    found = rows(simulation_table([first, other]))
    assert found["step, median"] == ["15 s", "30 s", "2.00"]
    assert found["tokens/s"] == ["0.556", "0.556", "1.00"]
    assert found["cost per hour"] == ["$10.00", "$10.00", "1.00"]
    assert found["weights sent"] == ["1 GB", "1 GB", "1.00"]
    assert found["spot: idle"] == ["45.0%", "45.0%", "1.00"]
    assert found["of all tokens"] == ["5.0%", "5.0%", "1.00"]


def test_spreads_over_seeds_stand_behind_the_median() -> None:
    found = rows(simulation_table([figures([outcome(0), outcome(1, slower=2.0), outcome(2, slower=4.0)])]))
    assert found["step, median"] == ["30 s (15 s..60 s)"]
    assert found["moves"] == ["3"]


def test_what_does_not_exist_is_a_dash_and_rows_that_nobody_has_are_left_out() -> None:
    found = rows(simulation_table([figures([empty_outcome()]), figures([outcome()])]))
    assert found["step, median"] == ["-", "15 s", "-"]
    assert found["cost per million tokens"] == ["-", "$5,000.00", "-"]
    assert found["unfinished rollouts"] == ["64", "0", "0.00"]
    assert "preemptions by engines" not in found


def test_runs_that_share_a_fleet_have_rows_of_their_own() -> None:
    one = outcome()
    both = replace(one, steps=[*one.steps, *(replace(step, run="code") for step in one.steps)])
    found = rows(simulation_table([figures([both])]))
    assert found["steps"] == ["4"]
    assert found["code: steps"] == found["math: steps"] == ["2"]
    assert found["math: step, p90"] == ["19 s"]


def test_what_is_printed_says_that_it_is_simulated_and_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    print_simulation(
        [figures([outcome(seed) for seed in range(3)]), figures([empty_outcome(seed) for seed in range(3)])]
    )
    printed = capsys.readouterr().out
    assert "Simulated, seeds 0 to 2: median (least..most)." in printed
    assert "nothing there: No step was finished with seed 0, 1, 2" in printed
    print_simulation([figures([outcome(seed) for seed in range(6)])])
    assert "median (95 % interval of the median)" in capsys.readouterr().out
    print_simulation([figures([outcome(7)])])
    assert "Simulated, seed 7." in capsys.readouterr().out


def test_a_scenario_of_no_token_is_printed_too(capsys: pytest.CaptureFixture[str]) -> None:
    print_simulation([figures([empty_outcome()])])
    assert "tokens/s" in capsys.readouterr().out


def test_names_from_outside_do_not_obey_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_simulation([figures([outcome(scenario="\x1b[31mred [bold]")])])
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "[31mred [bold]" in printed


def test_progress_names_simulated_time_steps_and_speed() -> None:
    seeds = {0: SimulationProgress(at_s=3600.0, until_s=7200.0, steps=12), 1: SimulationProgress(at_s=400.0, steps=2)}
    assert progress_text(seeds, 10.0) == "1:00:00 of 2:00:00, 12 steps, 400 times real time"
    assert progress_text({0: SimulationProgress(at_s=60.0, steps=1, of_steps=40)}, 0.0) == "1:00, 1 of 40 steps"


def test_progress_is_drawn_on_a_terminal_alone() -> None:
    for terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=120)
        with SimulationScreen(["six spot machines"], console) as screen:
            screen.show(0, {0: SimulationProgress(at_s=1800.0, until_s=3600.0, steps=3)}, of=2)
        drawn = console.file.getvalue()  # type: ignore[attr-defined]
        assert ("six spot machines" in drawn) == terminal
        assert ("25%" in drawn) == terminal


@pytest.mark.parametrize("terminal", [True, False])
def test_scenarios_of_one_name_each_have_their_progress(terminal: bool) -> None:
    with SimulationScreen(["six", "six"], Console(file=io.StringIO(), force_terminal=terminal)) as screen:
        for scenario, steps in enumerate([3, 4]):
            screen.show(scenario, {0: SimulationProgress(at_s=1800.0, until_s=3600.0, steps=steps)}, of=1)
        told = screen._line().split("; ")
    assert [line.split(" steps")[0] for line in told] == [f"six, now 30:00 of 1:00:00, {steps}" for steps in (3, 4)]


def test_elsewhere_a_line_says_how_far_it_is_when_it_takes_long(capsys: pytest.CaptureFixture[str]) -> None:
    with SimulationScreen(["six", "nine"], Console(file=io.StringIO())) as screen:
        screen.show(0, {0: SimulationProgress(at_s=1800.0, until_s=3600.0, steps=3)}, of=2)
        time.sleep(2.5)
    told = capsys.readouterr().err
    assert told.startswith("ebbtide: waiting for six, now 30:00 of 1:00:00, 3 steps, ")
    assert "; nine since " in told
