"""docs/guides/simulate.md names every option of the command, and its scenario and examples are valid."""

import re
from pathlib import Path
from typing import Final

from ebbtide.lab_commands import simulation
from ebbtide.lab_commands.simulate import simulate
from ebbtide.simulator.scenario.scenario_reader import parse_scenario

ROOT: Final = Path(__file__).parents[3]
PAGE: Final = (ROOT / "docs" / "guides" / "simulate.md").read_text()


def test_all_options_of_the_command_are_there() -> None:
    names = set(simulate.__annotations__) - {"scenario", "return", "show", "recording"}
    assert len(names) == 6
    for option in (*names, "from", "list"):
        assert f"--{option}" in PAGE


def test_the_scenario_of_the_page_is_a_scenario() -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)
    assert parse_scenario(text, Path("page.toml")).name == "six spot machines"


def test_the_examples_of_the_page_are_there() -> None:
    named = re.findall(r"examples/scenarios/\w+\.toml", PAGE)
    assert len(set(named)) == 3
    for name in named:
        assert (ROOT / name).is_file()


def test_the_rows_that_the_page_explains_are_rows_of_the_table() -> None:
    section = PAGE.partition("\n## Read the answer\n")[2].partition("\n## ")[0]
    named = [
        name for row in re.findall(r"^\| (`.*?) \| ", section, re.MULTILINE) for name in re.findall("`([^`]+)`", row)
    ]
    shown = [row.label for row in (*simulation._SPEED, *simulation._OF_RUN, *simulation._REST, simulation._IDLE)]
    assert len(named) == 11
    for name in named:
        assert any(name in label for label in shown), f"no row says {name}"
