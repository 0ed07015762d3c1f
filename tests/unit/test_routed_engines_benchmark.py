"""The benchmark of turn routing on real engines places by the rule it names, and computes what it says."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.turn_routing.engines.engine_fleet import PromptTokens
from benchmarks.turn_routing.engines.engine_sessions import BlockFigures
from benchmarks.turn_routing.engines.engine_trials import engine_figures
from benchmarks.turn_routing.engines.ruled_coordinator import OURS, RULES, NamedRule, Rule, placing_by
from benchmarks.turn_routing.session_work import SessionWork
from ebbtide.coordinator.rules.placement import Placement
from ebbtide.coordinator.rules.rollout_queue import QueuedRollout
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.step_pacing import VersionBounds
from tests.unit.coordinator.virtual_fleet import VirtualFleet
from tests.unit.simulator.rivals.test_rival_placement import Coordinator


def block(rule: str, *, tokens_per_s: float, cached: int, session_s: float = 1.0) -> BlockFigures:
    return BlockFigures(
        rule=rule, seconds=10.0, turns=4, tokens_per_s=tokens_per_s, session_s=session_s, prompts=2_000,
        repeated=1_000, engines=PromptTokens(read=2_000 - cached, cached=cached),
    )  # fmt: skip


def test_ratios_are_medians_of_rounds() -> None:
    played = [
        {
            OURS: block(OURS, tokens_per_s=100.0 * round_, cached=900),
            "least_loaded": block("least_loaded", tokens_per_s=50.0, cached=450, session_s=2.0),
            "sticky": block("sticky", tokens_per_s=100.0 * round_, cached=1_000),
        }
        for round_ in (1, 2, 4)
    ]
    found = engine_figures(played)
    assert found[OURS] == {"hits": 0.9, "tokens_per_s": 200.0, "session_s": 1.0}
    assert found["over_least_loaded"] == {"hits": 2.0, "tokens_per_s": 4.0, "session_s": 0.5}
    assert found["over_sticky"]["hits"] == 0.9


@pytest.mark.parametrize(("rule", "placed"), [("least_loaded", ["w1", "w0"]), ("sticky", ["w0", "w1"]), (OURS, None)])
def test_the_file_names_the_rule_that_places(tmp_path: Path, rule: str, placed: list[str] | None) -> None:
    assert rule in RULES
    file = tmp_path / "rule"
    file.write_text(rule)
    fleet, named = Coordinator(2, slots=8), NamedRule(file)

    def place(*episodes: str) -> list[str] | None:
        for number, episode in enumerate(episodes, len(fleet.run.running)):
            one = QueuedRollout(
                rollout_id=f"r{number}", episode_id=episode, bounds=VersionBounds(1, 1), length=10, place=number
            )
            fleet.run.admit(one)
        found = named(fleet.run, fleet.engines, 0.0)
        if found is None:
            return None
        fleet.start(found)
        return [name.session_id.removeprefix("s-").split("-")[0] for name in found]

    first = place("a", "b", "c")
    assert first == (None if placed is None else ["w0", "w1", "w0"])
    assert place("a", "b") == placed or placed is None or rule == "least_loaded"
    file.write_text("least_loaded")
    assert place("d") is not None


def test_a_coordinator_places_by_the_rule_or_by_its_own_where_that_has_no_answer() -> None:
    def on_the_last(run: RunState, engines: Sequence[WorkerSession], _: float) -> list[Placement]:
        return [Placement(one.rollout_id, engines[-1].session_id) for one in run.queue]

    def placed(rule: Rule) -> list[str]:
        fleet = VirtualFleet()
        fleet.attach("w0")
        fleet.attach("w1")
        fleet.submit(3)
        with placing_by(rule):
            fleet.round()
        return sorted(worker for _, _, worker in fleet.placed)

    assert placed(on_the_last) == ["w1"] * 3
    assert set(placed(lambda *_: None)) == {"w0", "w1"}


def test_scaled_sessions_have_the_lengths_of_the_simulated_ones_by_a_factor() -> None:
    whole, part = (
        [turn for place in range(500) for turn in SessionWork(seed=1, wait_s=1.0, scale=scale).turns(place, 0)]
        for scale in (1.0, 0.25)
    )
    assert len(whole) == len(part)
    assert sum(one.prompt for one in part) / sum(one.prompt for one in whole) == pytest.approx(0.25, rel=0.01)
