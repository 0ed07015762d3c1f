"""docs/simulate.md names every key of a scenario, every option of the command, and no key that is none."""

import re
from pathlib import Path
from typing import Final

import pytest

from ebbtide.cli.commands.simulate_commands import simulate
from ebbtide.simulator.scenario.fault_plan import PlannedFault
from ebbtide.simulator.scenario.machine_pool import MachinePool, ServingSpec, SpotTraceSpec
from ebbtide.simulator.scenario.quantity_spec import LengthSpec
from ebbtide.simulator.scenario.reading.scenario_reader import parse_scenario
from ebbtide.simulator.scenario.scenario import ScenarioSpec
from ebbtide.simulator.scenario.training_run import SimulatedEnvironment, TrainingRun

ROOT: Final = Path(__file__).parents[3]
PAGE: Final = (ROOT / "docs" / "simulate.md").read_text()
_TABLES: Final = {
    "key of the scenario": ScenarioSpec,
    "key of a `[[fleet]]`": MachinePool,
    "key of a `trace`": SpotTraceSpec,
    "key of `serving`": ServingSpec,
    "key of a `[[run]]`": TrainingRun,
    "key of a `[[fault]]`": PlannedFault,
}
#: Keys with sections of their own.
_SECTIONS: Final = {"fleet", "run", "fault"}


def keys(head: str) -> set[str]:
    """The code words in the first column of the table that begins with `head`."""
    _, _, table = PAGE.partition(f"| {head}")
    rows = table.partition("\n\n")[0].splitlines()[2:]
    return {word for row in rows for word in re.findall(r"`([a-z_]+)`", row.split("|")[1])}


@pytest.mark.parametrize("head", _TABLES)
def test_each_table_has_the_keys_of_its_record(head: str) -> None:
    fields = set(_TABLES[head].__struct_fields__)
    assert keys(head) == fields - (_SECTIONS if _TABLES[head] is ScenarioSpec else set())


def test_distributions_and_episodes_have_all_their_keys() -> None:
    assert keys("keys | distribution") | {"least", "most", "stretch"} == {*LengthSpec.__struct_fields__, "lengths"}
    for name in SimulatedEnvironment.__struct_fields__:
        assert f"`{name}`" in PAGE


def test_all_options_of_the_command_are_there() -> None:
    names = set(simulate.__annotations__) - {"scenario", "return", "show", "recording"}
    for option in (*names, "from", "list"):
        assert f"--{option}" in PAGE


def test_the_scenario_of_the_page_is_a_scenario() -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)
    assert parse_scenario(text, Path("page.toml")).name == "six spot machines"


def test_the_examples_of_the_page_are_there() -> None:
    for name in re.findall(r"examples/scenarios/\w+\.toml", PAGE):
        assert (ROOT / name).is_file()
