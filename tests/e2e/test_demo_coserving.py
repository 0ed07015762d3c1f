"""A short demo of a run beside a served model, on real engines: nothing is lost, and what users noticed is told."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from ebbtide.local_cluster.launcher import tethered

#: The first test waits for the demo; on a machine that has no base model yet, for that too.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    """The report of a demo of two steps, what it printed, and its directory."""
    folder = tmp_path_factory.mktemp("demo")
    options = ["--run-dir", str(folder), "--steps", "2", "--eval-problems", "20", "--window", "0:12"]
    command = tethered(sys.executable, "-m", "ebbtide.cli", "demo", "coserving", *options)
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return json.loads((folder / "report.json").read_text()), done.stdout, folder


def test_the_run_ends_well_and_every_rollout_is_accounted_for(demo: tuple[dict[str, Any], str, Path]) -> None:
    run = demo[0]["run"]
    assert run["status"] == "finished"
    assert run["rollouts_submitted"] == run["rollouts_trained"] == 2 * 32 * 8


def test_no_token_is_lost_however_often_the_engine_is_taken_back(demo: tuple[dict[str, Any], str, Path]) -> None:
    found, run = demo[0]["coserving"], demo[0]["run"]
    assert found["reclaims"] > 0
    assert found["tokens_lost"] == run["tokens_generated_twice"] == 0
    assert found["tokens_harvested"] == run["tokens_generated"] == run["tokens_stored"] > 10_000


def test_every_request_is_served_beside_the_run_as_alone(demo: tuple[dict[str, Any], str, Path]) -> None:
    found = demo[0]["coserving"]
    alone, beside = found["alone"], found["beside"]
    assert alone["requests"] >= 10
    assert beside["requests"] >= alone["requests"]
    assert alone["failed"] == beside["failed"] == 0
    assert found["ttft_target_ms"] == pytest.approx(1.6 * alone["ttft_p99_ms"])
    assert found["tpot_target_ms"] == pytest.approx(1.27 * alone["tpot_p99_ms"])
    assert alone["attained"] == 1.0


def test_rollout_steps_run_in_idle_time(demo: tuple[dict[str, Any], str, Path]) -> None:
    found = demo[0]["coserving"]
    assert 0 < found["rollout_steps_s"] < 1.2 * found["idle_s"]


def test_it_ends_with_a_verdict_and_a_timeline(demo: tuple[dict[str, Any], str, Path]) -> None:
    report, printed, folder = demo
    verdict = "ATTAINED" if report["coserving"]["slo_attained"] else "MISSED"
    assert verdict in printed
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_no_process_is_left(demo: tuple[dict[str, Any], str, Path]) -> None:
    folder = demo[2]
    left = [
        process.cmdline() for process in psutil.process_iter(["cmdline"]) if str(folder) in str(process.info["cmdline"])
    ]
    assert left == []
