"""The page about scenarios names every key, and its examples are valid."""

import re
from pathlib import Path

import pytest
from msgspec import Struct

from ebbtide.simulator.scenario.machine_pool import GrantTapeSpec, MachinePool, SpotTraceSpec
from ebbtide.simulator.scenario.quantity_spec import LengthSpec
from ebbtide.simulator.scenario.scenario import PlannedFault, PolicyChoice, ScenarioSpec
from ebbtide.simulator.scenario.training_run import SimulatedEnvironment, TrainingRun
from ebbtide.simulator.simulate import POLICIES
from tests.unit.simulator.scenario.scenario_texts import SHORT, problems

PAGE = Path(__file__).parents[4] / "docs" / "scenarios.md"
RECORDS = (
    ScenarioSpec, PolicyChoice, MachinePool, SpotTraceSpec, GrantTapeSpec, TrainingRun, SimulatedEnvironment,
    LengthSpec, PlannedFault,
)  # fmt: skip


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_every_key_is_on_the_page(record: type[Struct]) -> None:
    named = set(re.findall(r"`\[*([a-z_]+)\]*`|\[\[?([a-z]+)\]", PAGE.read_text()))
    words = {word for pair in named for word in pair}
    assert not set(record.__struct_fields__) - words


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_is_on_the_page_with_its_parameters(name: str) -> None:
    (row,) = [line for line in PAGE.read_text().splitlines() if line.startswith(f'| `"{name}"` |')]
    assert set(POLICIES[name].__struct_fields__) == set(re.findall(r"`([a-z_]+)`", row.split("|")[2]))


def test_the_examples_on_the_page_are_valid(tmp_path: Path) -> None:
    (tmp_path / "lengths.csv").write_text("quantile,tokens\n0.5,100\n1,900\n")
    blocks = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        text = block if "[[fleet]]" in block else SHORT + block
        assert not problems(text, tmp_path / "s.toml")
