"""A short `ebbtide demo agent` on real engines: an agent is trained through the gateway, and a worker is killed."""

import json
import subprocess
import sys
from typing import Any

import pytest

from ebbtide.local_cluster.launcher import tethered

#: The first test waits for the demo; on a machine that has no base model yet, for that too.
pytestmark = pytest.mark.timeout(900)

STEPS = 3


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The report of a short demo, and what it printed."""
    folder = tmp_path_factory.mktemp("demo-agent")
    command = tethered(
        sys.executable, "-m", "ebbtide.cli", "demo", "agent", "--run-dir", str(folder), "--steps", str(STEPS)
    )
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return json.loads((folder / "report.json").read_text()), done.stdout


def test_all_steps_are_trained_on_sessions_of_the_agent(demo: tuple[dict[str, Any], str]) -> None:
    report, _ = demo
    assert (report["training"]["status"], report["training"]["steps"]) == ("finished", STEPS)
    assert len(report["training"]["rewards"]) == STEPS
    assert report["sessions"] >= STEPS * 8 * 8
    assert report["training"]["rollouts_accounted_for"]
    assert 0 < report["reward_first"] < 1


def test_every_trace_is_what_its_agent_got(demo: tuple[dict[str, Any], str]) -> None:
    report, _ = demo
    assert report["traces_compared"] == report["sessions"]
    assert report["trace_mismatches"] == []
    assert report["tool_calls"] > report["sessions"]


def test_what_is_trained_on_has_the_logprobs_of_the_workers(demo: tuple[dict[str, Any], str]) -> None:
    report, _ = demo
    assert report["training"]["logprob_gap"] <= 0.02


def test_agents_see_no_error_of_a_killed_worker_and_its_completions_go_on(demo: tuple[dict[str, Any], str]) -> None:
    report, _ = demo
    assert report["agent_failures"] == []
    (kill,) = report["training"]["kills"]
    assert kill["generating"] >= 4
    resumed = [one for one in report["training"]["resumed"] if one["from"] == kill["program"] and one["offset"]]
    assert resumed
    assert {one["to"] for one in resumed}.isdisjoint({kill["program"]})


def test_a_session_is_shown_turn_by_turn(demo: tuple[dict[str, Any], str]) -> None:
    _, printed = demo
    assert "turn 1 (first): a prompt of 11 tokens, mask 0*11" in printed
    assert "turn 2 (continued)" in printed
    assert "trained on: " in printed
