"""The report of the agent demo, from made-up figures, and the run that it submits."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from ebbtide.cli.views.run import RunProgress
from ebbtide.demo.agents.agent_demo import AgentDemoOptions, agent_spec
from ebbtide.demo.agents.agent_player import PlayedSessions, ShownSession
from ebbtide.demo.agents.agent_report import agent_report, agent_summary, reward_ends
from ebbtide.demo.demo_report import KillRecord, make_report
from ebbtide.demo.report_picture import write_picture
from ebbtide.demo.token_accounts import TokenAccounts
from ebbtide.types.run import Run, RunStatus


def played(
    mismatches: Sequence[str] = (), failures: Sequence[str] = (), unmatched: Sequence[str] = ()
) -> PlayedSessions:
    found = PlayedSessions(mismatches=list(mismatches), failures=list(failures), unmatched=list(unmatched))
    found.add([{"role": "tool"}, {"role": "assistant"}], ShownSession({"turns": [1, 2]}, reward=1.0))
    return found


def summed_up(sessions: PlayedSessions) -> tuple[dict[str, str], int]:
    run = Run(run_id="demo-agent", spec=agent_spec(AgentDemoOptions(control=True)), status=RunStatus.FINISHED)
    progress = RunProgress("demo-agent", run=run)
    progress.steps = {step: {"reward": step / 10} for step in range(1, 9)}
    accounts = TokenAccounts(generated=90, by_worker={"w": 90}, lost={}, interrupted=0)
    kills = [KillRecord(program="worker-2", at_s=1.0, step=3, generating=4)]
    training = make_report(progress, run, accounts, kills=kills, seconds={"run": 9.0}, flush_tokens=4)
    report = agent_report(training, sessions)
    return dict(agent_summary(report, Path("report.json"))), len(report.trace_mismatches)


def test_the_summary_compares_the_ends_of_the_curve_and_names_the_control() -> None:
    told, _ = summed_up(played())
    assert told["reward"].startswith("0.300 in the first 5 steps, 0.600 in the last 5 (rewards were permuted")
    assert told["sessions"] == "1 with 2 turns and 1 calls of the tool"
    assert told["killed"] == "worker-2 after step 3, in the middle of 4 completions"
    assert told["errors"] == "none that an agent saw"


def test_the_summary_says_that_traces_differ_and_that_agents_failed() -> None:
    told, mismatches = summed_up(played(mismatches=["a", "b"], failures=["c"], unmatched=["d"]))
    assert mismatches == 2
    assert "2 DIFFER" in told["traces"]
    assert told["errors"].startswith("1 that")
    assert told["unmatched"].startswith("1 sessions")


def test_a_run_without_steps_has_no_ends() -> None:
    assert reward_ends([]) == (None, None)
    assert reward_ends([0.5]) == (0.5, 0.5)


def test_the_picture_is_drawn_without_evaluations(tmp_path: Path) -> None:
    run = Run(run_id="demo-agent", spec=agent_spec(AgentDemoOptions()), status=RunStatus.FINISHED)
    progress = RunProgress("demo-agent", run=run)
    progress.steps = {1: {"reward": 0.5}}
    accounts = TokenAccounts(generated=0, by_worker={}, lost={}, interrupted=0)
    write_picture(make_report(progress, run, accounts, kills=(), seconds={}, flush_tokens=4), tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 0


@pytest.mark.parametrize("control", [False, True])
def test_the_control_changes_the_permutation_of_rewards_and_nothing_else(control: bool) -> None:
    spec = agent_spec(AgentDemoOptions(seed=4, steps=7, control=control))
    assert (spec.seed, spec.trainer.steps, spec.from_agents) == (4, 7, True)
    assert spec.trainer.permute_rewards is control
