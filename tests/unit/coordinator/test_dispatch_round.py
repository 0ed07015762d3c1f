"""Rounds run in virtual time, without a store, an event loop or a clock, as a simulator runs them."""

import ast
from collections import Counter
from pathlib import Path
from typing import Final

from ebbtide import coordinator
from ebbtide.types.fleet import WorkerState
from ebbtide.types.weights import PolicyVersion
from tests.unit.coordinator.model_fleet import rollout
from tests.unit.coordinator.virtual_fleet import VirtualFleet, lived

ROOT: Final = Path(coordinator.__file__).parent


def test_rollouts_are_placed_lost_and_continued_without_a_store_or_an_event_loop() -> None:
    fleet = lived()
    before = [(rollout_id, worker) for at, rollout_id, worker in fleet.placed if at < 1.0]
    after = [(rollout_id, worker) for at, rollout_id, worker in fleet.placed if at > 1.0]
    assert len(before) == 8
    assert {worker for _, worker in after} == {"stays"}
    lost = {rollout_id for rollout_id, worker in before if worker == "gone"}
    assert {rollout_id for rollout_id, _ in after} == lost, "they are the first in the queue"
    assert all(fleet.run.running[name].start == 5 for name in lost), "behind their stored tokens"
    (listed,) = [one for one in fleet.registry.workers() if one.worker_id == "gone"]
    assert listed.state is WorkerState.SUSPECTED


def test_the_same_happenings_lead_to_the_same_decisions_at_the_same_times() -> None:
    assert lived().placed == lived().placed


def test_a_round_yields_the_dead_letters_of_rollouts_that_no_version_can_serve() -> None:
    fleet = VirtualFleet()
    fleet.attach("w")
    fleet.run.versions.announce(PolicyVersion(policy="policy", version=2, root=b"r" * 32))
    for _ in range(3):
        fleet.run.versions.note_failed_install(1)
    fleet.submit(2, max_version=1)
    fleet.round()
    assert fleet.letters == ["x0", "x1"]


def test_what_came_with_a_longer_context_is_given_with_it_though_the_queue_was_measured_before() -> None:
    fleet = VirtualFleet()
    fleet.attach("short", context=50)
    fleet.run.note_context(50)
    fleet.round()
    fleet.attach("long", context=100)
    fleet.run.admit(rollout("x", length=60))
    fleet.round()
    assert [worker for _, _, worker in fleet.placed] == ["long"]
    assert fleet.run.context == 100


def test_what_needs_the_context_of_a_worker_that_left_waits_for_its_return() -> None:
    fleet = VirtualFleet()
    fleet.attach("short", context=50)
    long = fleet.attach("long", context=100)
    fleet.run.note_context(100)
    fleet.run.admit(rollout("x", length=60))
    fleet.round()
    fleet.registry.detach(long, "its machine was taken back")
    for _ in range(120):
        fleet.round(1.0)
    assert fleet.letters == []
    fleet.attach("long", context=100)
    fleet.round()
    assert [worker for _, _, worker in fleet.placed] == ["long", "long"]


def test_a_worker_with_the_runs_context_has_room_for_whatever_the_run_makes() -> None:
    fleet = VirtualFleet(context=50)
    fleet.attach("short", context=50)
    fleet.attach("long", context=10_000)
    for number in range(4):
        fleet.run.admit(rollout(f"x{number}", length=10))
    fleet.round()
    assert Counter(worker for _, _, worker in fleet.placed) == {"short": 2, "long": 2}


def test_a_round_says_when_the_next_one_is_due() -> None:
    fleet = VirtualFleet()
    fleet.round()
    assert fleet.rounds.pause_s(fleet.now) == 0.25
    fleet.round(0.01)
    assert fleet.rounds.pause_s(fleet.now) == 0.05, "workers' runs and versions were not looked at"


def test_what_decides_reads_no_clock_but_the_one_that_the_state_was_given() -> None:
    allowed = {
        "state/coordinator_state.py",  # where it is chosen
    }
    readers = {
        path.relative_to(ROOT).as_posix()
        for room in ("state", "dispatch", "rules", "fleet")
        for path in (ROOT / room).glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import) and any(name.name == "time" for name in node.names)
    }
    assert readers == allowed
