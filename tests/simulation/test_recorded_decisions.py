"""The decisions of coordinators that are killed, superseded and cut off from a store that forgets are taken again."""

import subprocess
import sys
from pathlib import Path

from ebbtide.simulator.decision_replay import ReplayedCoordinator

#: Two coordinators lead in turn, and the store comes back, which may have forgotten its last writes.
SEED = 3


def test_all_decisions_of_a_seed_are_taken_again_in_another_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.simulation", "--seed", str(SEED), "--record", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    reports = [ReplayedCoordinator().play(path) for path in sorted(tmp_path.iterdir())]
    assert [report.first_difference for report in reports if not report.equal] == []
    assert sum(report.placements > 0 for report in reports) >= 2, "more than one coordinator led"
    assert sum(report.placements_equal for report in reports) >= 30
    assert sum(report.decisions_equal for report in reports) >= 30
