"""Agents play sessions of a run: which begin, which are rewarded, and what is told of them."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import httpx2
import openai
import pytest

from ebbtide.cli.views.run import ResumedRun, RunProgress
from ebbtide.demo.agents.agent_player import AgentPlayer, groups_for
from ebbtide.demo.agents.agent_report import shown_lines
from ebbtide.demo.agents.session_api import SessionApi
from ebbtide.errors import EbbtideError
from ebbtide.types.run import BatchSpec, EnvironmentSpec, Run, RunSpec, RunStatus, TrainerSpec
from ebbtide.types.weights import PolicyVersion
from tests.support.waiting import wait_until

SPEC = RunSpec(
    name="agents",
    model="m",
    environment=EnvironmentSpec(name="agents"),
    batch=BatchSpec(groups_per_step=2, group_size=2, max_staleness=1),
    trainer=TrainerSpec(steps=2),
)


class FakeGateway:
    """Answers agents as a model does that always follows the tool, and keeps sessions. Ids are characters' codes."""

    def __init__(self) -> None:
        self.groups: dict[str, str] = {}
        self.said: dict[str, list[str]] = {}
        self.rewards: dict[str, float] = {}
        self.dropped: dict[str, str] = {}
        self.failing: set[str] = set()
        self.altered: set[str] = set()

    async def answer(self, request: httpx2.Request) -> httpx2.Response:
        session = request.url.path.split("/")[2]
        if session in self.failing:
            return httpx2.Response(503, json={"error": {"message": "nobody serves"}})
        last = json.loads(request.content)["messages"][-1]["content"].split()[-1]
        message: dict[str, Any] = {"role": "assistant", "content": last}
        if not last.isdigit():
            function = {"name": "look", "arguments": json.dumps({"at": last})}
            message = {"role": "assistant", "tool_calls": [{"id": last, "type": "function", "function": function}]}
        self.said.setdefault(session, []).append(last if last.isdigit() else f'[look(at="{last}")]')
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        body = {"id": "c", "object": "chat.completion", "created": 0, "model": "run", "choices": [choice]}
        return httpx2.Response(200, json=body)

    async def open(self, session_id: str, group_id: str) -> None:
        self.groups[session_id] = group_id

    async def trace(self, session_id: str) -> dict[str, Any]:
        said = ["something else"] if session_id in self.altered else self.said[session_id]
        sampled = [list(map(ord, text)) for text in said]
        spans = [[{"version": "1", "start": 0, "end": len(ids)}] for ids in sampled]
        turns = [
            {
                "matched_by": "first",
                "prompt_token_ids": [],
                "prompt_mask": [],
                "completions": [
                    {"id": f"{session_id}/{at}", "token_ids": ids, "logprobs": [0.0] * len(ids), "weight_versions": one}
                ],
            }
            for at, (ids, one) in enumerate(zip(sampled, spans, strict=True))
        ]
        whole = [token for ids in sampled for token in ids]
        lists = {"logprobs": [0.0] * len(whole), "weight_versions": [1] * len(whole), "loss_mask": [1] * len(whole)}
        branch = {"prompt_token_ids": [], "token_ids": whole, **lists}
        names = {"id": session_id, "group_id": self.groups[session_id]}
        return {**names, "turns": turns, "branches": [branch], "unmatched_tokens": 0}

    async def reward(self, session_id: str, reward: float) -> None:
        self.rewards[session_id] = reward

    async def drop(self, session_id: str, reason: str) -> None:
        self.dropped[session_id] = reason


def begun_run() -> Run:
    return Run(run_id="run", spec=SPEC, status=RunStatus.RUNNING, newest=PolicyVersion(policy="policy", version=1))


@asynccontextmanager
async def playing(gateway: FakeGateway, progress: RunProgress) -> AsyncIterator[tuple[AgentPlayer, asyncio.Task[None]]]:
    http = httpx2.AsyncClient(transport=httpx2.MockTransport(gateway.answer))
    async with openai.AsyncOpenAI(
        base_url="http://gateway/v1", api_key="key", http_client=http, max_retries=0
    ) as client:
        api = cast("SessionApi", gateway)
        player = AgentPlayer(SPEC, progress, client, api, lambda ids: "".join(map(chr, ids)))
        task = asyncio.create_task(player.run())
        try:
            yield player, task
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError, EbbtideError):
                await task


async def test_a_step_s_groups_are_played_by_as_many_sessions_as_they_have_and_each_is_rewarded() -> None:
    gateway, progress = FakeGateway(), RunProgress("run", run=begun_run())
    async with playing(gateway, progress) as (player, _):
        await wait_until(lambda: len(gateway.rewards) == 4)
        assert gateway.groups == {"g0.0.0": "g0", "g0.1.0": "g0", "g1.0.0": "g1", "g1.1.0": "g1"}
        assert set(gateway.rewards.values()) == {1.0}
        assert (player.played.sessions, player.played.turns, player.played.tool_calls) == (4, 12, 8)
        assert player.played.mismatches == []


async def test_the_next_groups_begin_once_a_step_is_trained_and_none_after_the_last() -> None:
    gateway, progress = FakeGateway(), RunProgress("run", run=begun_run())
    async with playing(gateway, progress):
        await wait_until(lambda: len(gateway.rewards) == 4)
        progress.steps[1] = {}
        await wait_until(lambda: len(gateway.rewards) == 8)
        assert set(gateway.groups.values()) == {"g0", "g1", "g2", "g3"}
    assert [groups_for(SPEC, steps, lost=0) for steps in (0, 1, 2)] == [2, 4, 4]
    assert groups_for(SPEC, 1, lost=3) == 7


async def test_nothing_is_played_before_there_is_a_version() -> None:
    gateway, progress = FakeGateway(), RunProgress("run")
    async with playing(gateway, progress):
        await asyncio.sleep(0)
        assert gateway.groups == {}
        progress.run = begun_run()
        await wait_until(lambda: len(gateway.rewards) == 4)


async def test_a_session_whose_agent_saw_an_error_is_dropped_and_another_one_takes_its_place() -> None:
    gateway, progress = FakeGateway(), RunProgress("run", run=begun_run())
    gateway.failing = {"g0.1.0"}
    async with playing(gateway, progress) as (player, _):
        await wait_until(lambda: len(gateway.rewards) == 4)
        assert gateway.dropped == {"g0.1.0": "agent_failed"}
        assert "g0.1.1" in gateway.rewards
        assert "InternalServerError" in player.played.failures[0]


async def test_agents_that_fail_again_and_again_end_the_demo() -> None:
    gateway, progress = FakeGateway(), RunProgress("run", run=begun_run())
    gateway.failing = {f"g0.0.{attempt}" for attempt in range(99)}
    async with playing(gateway, progress) as (_, task):
        await wait_until(task.done)
        with pytest.raises(EbbtideError, match=r"g0 fail again and again: .* nobody serves"):
            task.result()


async def test_a_trace_that_is_not_what_its_agent_got_is_told() -> None:
    gateway, progress = FakeGateway(), RunProgress("run", run=begun_run())
    gateway.altered = {"g1.0.0"}
    async with playing(gateway, progress) as (player, _):
        await wait_until(lambda: len(gateway.rewards) == 4)
        assert {one.split(":")[0] for one in player.played.mismatches} == {"g1.0.0"}


async def test_the_trace_to_show_is_of_a_session_that_went_on_at_another_worker() -> None:
    gateway, progress = FakeGateway(), RunProgress("run", run=begun_run())
    progress.resumed = [ResumedRun("g1.1.0/1", "worker-2", "worker-1", 9), ResumedRun("g0.1.0/1", "w", "w", 0)]
    async with playing(gateway, progress) as (player, _):
        await wait_until(lambda: len(gateway.rewards) == 4)
        assert player.played.shown is not None
        assert player.played.shown.trace == await gateway.trace("g1.1.0")
        told = list(shown_lines(player.played, lambda ids: "".join(map(chr, ids))))
        assert told[0] == "Session g1.1.0 of group g1, reward 1"
        assert told[9].strip() == "begun at worker-2, resumed on worker-1 after 9 stored tokens"
