"""A fleet in virtual time loses nothing, and is measured."""

from pathlib import Path

from tests.simulation.crowd import CrowdPlan, remembered_bytes, simulate_crowd


def test_a_small_crowd_works_loses_half_its_workers_and_ends(tmp_path: Path) -> None:
    plan = CrowdPlan(workers=8, slots=4, queued=40, runs=2, rate=40.0, seconds=2.0, finished=100)
    found = simulate_crowd(plan, tmp_path)
    assert found["tokens_lost"] == 0
    assert found["finished"] >= 72 + 100
    assert 0 < found["decision_p99_ms"] <= found["decision_max_ms"]
    assert found["coordinator_bytes_per_open"] > 0


def test_the_bytes_of_an_object_are_those_of_all_that_it_leads_to() -> None:
    class Holder:
        def __init__(self, kept: list[bytes]) -> None:
            self.kept = kept

    small = remembered_bytes(Holder([]))
    assert remembered_bytes(Holder([bytes(1000), bytes(1001)])) - small >= 2001
    assert remembered_bytes(Holder([b"x" * 1000] * 100)) - small < 3000, "each object once"
