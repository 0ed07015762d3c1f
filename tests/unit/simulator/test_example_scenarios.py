"""The scenarios that come with the simulator run, and their accounts add up."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from ebbtide.simulator.scenario.scenario_reader import read_scenario
from ebbtide.simulator.simulate import known_names, simulate

EXAMPLES = sorted((Path(__file__).parents[3] / "examples" / "scenarios").glob("*.toml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_simulated_and_its_tokens_and_costs_add_up(path: Path) -> None:
    scenario = replace(read_scenario(path, known_names()), hours=0.15, steps=2)
    outcome = simulate(scenario, seed=1)
    tokens = outcome.tokens
    assert tokens.kept > 0
    under_way = tokens.generated - tokens.kept - tokens.lost - tokens.dropped
    assert under_way > 0 if outcome.unfinished else under_way == 0
    assert {pool.name for pool in scenario.fleet} <= {pool.pool for pool in outcome.pools}
    assert all(0.0 <= pool.idle_share <= 1.0 for pool in outcome.pools)
    assert sum(pool.cost for pool in outcome.pools) > 0.0
