"""Parts of Ebbtide's rounds are replaced while a round decides, and are themselves again after it."""

import pytest

from benchmarks.rivals.changed_rounds import (
    NO_KINDS,
    NO_MEMORY,
    ChangedPolicy,
    Replaced,
    learning,
    placing,
    replaced,
    told,
)
from ebbtide.coordinator.forecasts.throughput import WorkerThroughput
from ebbtide.simulator.scenario.scenario import Scenario
from ebbtide.simulator.world.simulation import Simulation
from tests.fakes.simulated_profiles import PlainProfiles
from tests.unit.simulator.rivals.test_policies import RUN, SPOT

ALL = (
    *(NO_KINDS, NO_MEMORY),
    *(placing(pending_limit=lambda _: 1), told(lambda _: WorkerThroughput())),
)


def test_a_part_is_itself_again_even_if_a_round_fails() -> None:
    before = [getattr(one.owner, one.name) for one in ALL]

    def failing_round() -> None:
        with replaced(ALL):
            assert all(getattr(one.owner, one.name) is one.value for one in ALL)
            raise RuntimeError("a round failed")

    with pytest.raises(RuntimeError, match="a round failed"):
        failing_round()
    assert [getattr(one.owner, one.name) for one in ALL] == before


@pytest.mark.parametrize("part", ["learning", "telling"])
def test_rounds_meet_what_parts_are_replaced_by(part: str) -> None:
    met = list[str]()

    def speed(_: str = "") -> WorkerThroughput:
        met.append("speed")
        return WorkerThroughput()

    parts: dict[str, Replaced] = {"learning": learning(speed), "telling": told(speed)}
    scenario = Scenario(name="test", hours=1.0, fleet=(SPOT,), run=(RUN,))
    Simulation(scenario, 0, ChangedPolicy(parts=(parts[part],)), PlainProfiles()).run(lambda _: None)
    assert set(met) == {"speed"}
