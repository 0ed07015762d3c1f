"""A fixed set of seeds, each a whole system that is broken in at least five ways. Run as a process of its own: what a
seed does hangs on nothing else that ran before it."""

import json
import subprocess
import sys
from typing import Any, Final

import pytest

from tests.simulation.bugs import BUGS
from tests.simulation.faults import CELLS, IN_TURN, draw
from tests.simulation.plan import Plan

#: So many in turn draw every cell of the matrix at least once.
FIXED: Final = len(CELLS) // IN_TURN
#: Some of the planted bugs, and a seed that finds each.
_QUICK_BUGS: Final = {
    "a finish that leaves its fence": 0,
    "a requeue that loses tokens": 1,
    "a resume one token too far": 1,
    "a standby that serves": 0,
    "an append that goes to the run before it": 1,
}


def run(*arguments: str, timeout: float) -> tuple[int, dict[str, Any], str]:
    """The exit code, the results and all that was said."""
    command = [sys.executable, "-m", "tests.simulation", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    said = done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1]) if done.stdout.endswith("}\n") else {}
    return done.returncode, found, said


def test_every_seed_has_three_workers_twenty_rollouts_and_five_faults() -> None:
    for seed in range(200):
        plan = Plan(seed)
        assert plan.workers >= 3
        assert sum(len(batch) for run in plan.runs for batch in run.batches[: run.least]) >= 20
        assert len(draw(seed)) >= 5


def test_most_seeds_have_several_runs_and_many_two_coordinators() -> None:
    plans = [Plan(seed) for seed in range(200)]
    assert {len(plan.runs) for plan in plans} == {1, 2, 3}
    assert sum(len(plan.runs) > 1 for plan in plans) > 120
    assert sum(len(plan.runs) > 1 and plan.standby for plan in plans) > 60
    assert sum(any(run.cancel_after >= 0 for run in plan.runs) for plan in plans) > 20


def test_runs_have_the_same_ids_and_other_rollouts() -> None:
    first, second, *_ = next(plan for plan in map(Plan, range(50)) if len(plan.runs) > 1).runs
    shared = first.wanted.keys() & second.wanted.keys()
    assert len(shared) > 10
    assert all(first.wanted[name].request.prompt_ids != second.wanted[name].request.prompt_ids for name in shared)


def test_the_fixed_seeds_draw_every_cell_of_the_matrix() -> None:
    assert {fault.cell for seed in range(FIXED) for fault in draw(seed)} == set(CELLS)


@pytest.mark.timeout(600)
def test_all_holds_in_the_fixed_seeds_and_all_cells_are_visited() -> None:
    code, found, said = run("--seeds", f"0:{FIXED}", timeout=580)
    assert code == 0, said
    missing = {str(cell) for cell in CELLS} - found["cells"].keys()
    assert not missing
    assert found["several_runs"] > FIXED / 2
    assert found["takeovers"] > FIXED / 4


@pytest.mark.timeout(120)
def test_a_seed_replays_exactly() -> None:
    digests = set()
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-m", "tests.simulation", "--seed", "5", "--trace"],
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
        digests.add(done.stdout)
    assert len(digests) == 1
    assert "strikes" in digests.pop()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("bug", "seed"), _QUICK_BUGS.items())
def test_a_planted_bug_is_found(bug: str, seed: int) -> None:
    code, _, said = run("--seed", str(seed), "--bug", bug, timeout=110)
    assert code == 1, said
    assert f"seed {seed}:" in said


@pytest.mark.nightly
@pytest.mark.timeout(0)
def test_five_thousand_seeds_hold() -> None:
    code, found, said = run("--seeds", "0:5000", "--jobs", "2", timeout=6 * 3600)
    assert code == 0, said
    assert found["seeds"] == 5000
    assert found["cells"].keys() >= {str(cell) for cell in CELLS}


@pytest.mark.nightly
@pytest.mark.timeout(0)
def test_all_planted_bugs_but_one_are_found() -> None:
    _, found, said = run("--bugs", "--seeds", "0:100", "--jobs", "2", timeout=6 * 3600)
    assert {*found["found"], *found["missed"]} == {*BUGS}
    assert len(found["missed"]) <= 1, said
