"""Sums up the agent demo: its training, its sessions, and whether traces are what agents got."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Final

from msgspec import Struct

from ebbtide.demo.agents.agent_player import PlayedSessions
from ebbtide.demo.agents.trace_text import Decode, trace_lines
from ebbtide.demo.demo_report import DemoReport, resumed_text

#: Steps at either end of a run of which the mean reward is compared.
ENDS: Final = 5
#: Mismatches and failures that the report quotes.
_QUOTED: Final = 20


class AgentReport(Struct, frozen=True, kw_only=True):
    """The contents of `report.json`."""

    reward_first: float | None  # mean of the first `ENDS` steps
    reward_last: float | None  # mean of the last `ENDS` steps
    sessions: int  # that were rewarded
    turns: int
    tool_calls: int
    traces_compared: int
    traces_different: int  # differences that were found in them
    trace_mismatches: list[str]  # some of the differences
    sessions_unmatched: int  # that became several branches, as an answer came back otherwise than it was sampled
    unmatched: list[str]
    agent_errors: int  # that agents saw
    agent_failures: list[str]  # some of the errors
    shown_resumed: bool  # whether the shown session went on at another worker
    training: DemoReport


def agent_report(training: DemoReport, played: PlayedSessions) -> AgentReport:
    first, last = reward_ends(training.rewards)
    return AgentReport(
        reward_first=first,
        reward_last=last,
        sessions=played.sessions,
        turns=played.turns,
        tool_calls=played.tool_calls,
        traces_compared=played.sessions,
        traces_different=len(played.mismatches),
        trace_mismatches=played.mismatches[:_QUOTED],
        sessions_unmatched=len(played.unmatched),
        unmatched=played.unmatched[:_QUOTED],
        agent_errors=len(played.failures),
        agent_failures=played.failures[:_QUOTED],
        shown_resumed=bool(played.shown and played.shown.moves),
        training=training,
    )


def reward_ends(rewards: Sequence[float]) -> tuple[float | None, float | None]:
    """Returns the mean reward of the first steps and of the last ones; None without steps."""
    return (fmean(rewards[:ENDS]), fmean(rewards[-ENDS:])) if rewards else (None, None)


def shown_lines(played: PlayedSessions, decode: Decode) -> Iterator[str]:
    """Shows one session turn by turn."""
    if played.shown is None:
        return
    moves = {
        one.rollout: f"begun at {one.source}, resumed on {one.target} after {one.offset} stored tokens"
        for one in played.shown.moves
    }
    yield from trace_lines(played.shown.trace, decode, reward=played.shown.reward, moves=moves)


def agent_summary(report: AgentReport, path: Path) -> Iterator[tuple[str, str]]:
    """Tells the report in lines of a name and a text."""
    training = report.training
    if report.reward_first is not None and report.reward_last is not None:
        what = " (rewards were permuted in each group: the control)" if training.control else ""
        ends = min(ENDS, len(training.rewards))
        text = f"{report.reward_first:.3f} in the first {ends} steps, {report.reward_last:.3f} in the last {ends}"
        yield "reward", text + what
    yield "sessions", f"{report.sessions:,} with {report.turns:,} turns and {report.tool_calls:,} calls of the tool"
    different = report.traces_different
    told = f"{different:,} DIFFERENCES, see the report" if different else "all are what agents got"
    yield "traces", f"{report.traces_compared:,} compared with what agents got, token by token: {told}"
    yield "unmatched", f"{report.sessions_unmatched:,} sessions with an answer that could not be matched"
    yield "errors", f"{report.agent_errors or 'none'} that an agent saw"
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in training.rollouts_dropped.items()) or "none"
    yield "dropped", dropped
    for kill in training.kills:
        yield "killed", f"{kill.program} after step {kill.step}, in the middle of {kill.generating} completions"
    yield "resumed", resumed_text(training)
    yield "tokens", f"{training.tokens_generated:,} generated, {training.tokens_generated_twice:,} of them regenerated"
    if training.logprob_gap is not None:
        yield "logprob gap", f"{training.logprob_gap:.5f} between workers and trainer, mean absolute"
    yield "seconds", ", ".join(f"{name} {seconds:.0f}" for name, seconds in training.seconds.items())
    yield "checkpoint", training.checkpoint
    yield "report", f"{path}, {path.with_suffix('.png')}"
