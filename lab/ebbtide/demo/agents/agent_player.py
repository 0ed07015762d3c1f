"""Has agents play sessions of a run, group after group, and rewards each one.

An agent gets a client whose base URL names its session, and nothing else. Its session's trace is read and compared with
its conversation before the reward ends it.

Invariant: a group begins only while the run lacks groups for its next step, so few tokens are older than the newest
version. What is known of sessions is in `played`, and is lost with the process.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
import openai

from ebbtide.cli.views.run import ResumedRun, RunProgress
from ebbtide.demo.agents.number_agent import find_number
from ebbtide.demo.agents.number_problem import NumberProblem, number_problem
from ebbtide.demo.agents.session_api import SessionApi
from ebbtide.demo.agents.trace_text import Decode, trace_mismatches
from ebbtide.demo.worker_kills import poll_until
from ebbtide.errors import EbbtideError
from ebbtide.types.run import RunSpec

#: Why a session is dropped whose agent saw an error. Another one is played in its place.
_FAILED: Final = "agent_failed"
#: A group of which so many sessions have failed shows a defect, no accident.
_MOST_FAILURES: Final = 16


@dataclass(frozen=True)
class ShownSession:
    """A session to show: its trace, its reward, and its completions that went on at another worker."""

    trace: dict[str, Any]
    reward: float
    moves: Sequence[ResumedRun] = ()

    @property
    def worth(self) -> tuple[bool, float]:
        return bool(self.moves), self.reward


@dataclass
class PlayedSessions:
    """Sums over all sessions so far."""

    sessions: int = 0
    turns: int = 0
    tool_calls: int = 0
    mismatches: list[str] = field(default_factory=list)  # what in traces was not what agents got
    unmatched: list[str] = field(default_factory=list)  # answers that came back, and could not be matched
    failures: list[str] = field(default_factory=list)  # errors that agents saw
    shown: ShownSession | None = None  # the newest, if possible one that went on elsewhere and found its number

    def add(self, conversation: Sequence[Mapping[str, Any]], session: ShownSession) -> None:
        self.sessions += 1
        self.turns += len(session.trace["turns"])
        self.tool_calls += sum(one["role"] == "tool" for one in conversation)
        if self.shown is None or session.worth >= self.shown.worth:
            self.shown = session


class AgentPlayer:
    """Plays a run's sessions. `client`: of the gateway; `decode`: ids of the run's model to text."""

    def __init__(
        self, spec: RunSpec, progress: RunProgress, client: openai.AsyncOpenAI, api: SessionApi, decode: Decode
    ) -> None:
        self._spec, self._progress, self._client, self._api, self._decode = spec, progress, client, api, decode
        self._begun = 0
        self.played = PlayedSessions()

    async def run(self) -> None:
        """Plays until cancelled. Raises `EbbtideError` if the sessions of a group fail again and again."""
        await poll_until(lambda: bool(self._progress.run and self._progress.run.newest))
        try:
            async with asyncio.TaskGroup() as groups:
                while True:
                    await poll_until(self._wanted)
                    groups.create_task(self._group(self._begun))
                    self._begun += 1
        except* EbbtideError as failures:
            raise _first(failures) from None

    def _wanted(self) -> bool:
        """Whether the next step lacks a group. A session that the trainer dropped may have made its group useless."""
        steps, run = max(self._progress.steps, default=0), self._progress.run
        dropped = run.dropped.items() if run else ()
        lost = sum(count for reason, count in dropped if reason != _FAILED)
        return steps < self._spec.trainer.steps and self._begun < groups_for(self._spec, steps, lost)

    async def _group(self, number: int) -> None:
        problem, failed = number_problem(self._spec.seed, "train", number), asyncio.Semaphore(_MOST_FAILURES)
        async with asyncio.TaskGroup() as members:
            for member in range(self._spec.batch.group_size):
                members.create_task(self._member(f"g{number}", f"g{number}.{member}", problem, failed))

    async def _member(self, group: str, name: str, problem: NumberProblem, failed: asyncio.Semaphore) -> None:
        """Plays a session, again as long as its agent fails."""
        attempt = 0
        while not await self._session(group, f"{name}.{attempt}", problem):
            attempt += 1
            if failed.locked():
                raise EbbtideError(f"agents of {group} fail again and again: {self.played.failures[-1]}")
            await failed.acquire()

    async def _session(self, group: str, session: str, problem: NumberProblem) -> bool:
        await self._api.open(session, group)
        base = str(self._client.base_url).removesuffix("/").removesuffix("/v1")
        client = self._client.copy(base_url=f"{base}/sessions/{session}/v1")
        try:
            conversation = await find_number(client, self._progress.run_id, problem.names[0], problem.look)
        except (openai.OpenAIError, aiohttp.ClientError) as error:
            self.played.failures.append(f"{session}: {type(error).__name__}: {error}")
            await self._api.drop(session, _FAILED)
            return False
        reward = problem.reward(conversation)
        await self._note(session, conversation, reward)
        await self._api.reward(session, reward)
        return True

    async def _note(self, session: str, conversation: Sequence[Mapping[str, Any]], reward: float) -> None:
        """Compares a session's trace with its conversation, and adds it to what was played."""
        trace, played = await self._api.trace(session), self.played
        played.mismatches += [f"{session}: {one}" for one in trace_mismatches(trace, conversation, self._decode)]
        completions = [one for turn in trace["turns"] for one in turn["completions"]]
        if trace["unmatched_tokens"]:
            said = [self._decode(one["token_ids"]) for one in completions]
            played.unmatched.append(f"{session}: {trace['unmatched_tokens']} tokens of {said}")
        ids = {one["id"] for one in completions}
        moves = [one for one in self._progress.resumed if one.offset and one.rollout in ids]
        played.add(conversation, ShownSession(trace, reward, moves))


def groups_for(spec: RunSpec, steps: int, lost: int) -> int:
    """Counts the groups that a run needs until `steps + 1` steps are trained, of which `lost` cannot be trained on."""
    return (min(steps, spec.trainer.steps - 1) + 1) * spec.batch.groups_per_step + lost


def _first(failures: BaseExceptionGroup[EbbtideError]) -> EbbtideError:
    """Of a group of a group's failures, the first one."""
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
