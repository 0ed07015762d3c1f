"""Sessions before real coordinators and workers: their traces are what the engines made, whoever dies meanwhile."""

import asyncio
from contextlib import aclosing
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from ebbtide.trainer.learning.training_batches import samples_of
from ebbtide.types.rollout import Trajectory
from ebbtide.types.run import TrainerSpec
from ebbtide.types.tokens import unpack_ids, unpack_tokens
from tests.chaos.cluster import TOKEN
from tests.fakes.scripted_engine import follow
from tests.integration.gateway.conftest import SCRIPT, GatewayStand

Message = dict[str, Any]
COUNT = 40
#: Openings to which the script says no special token: these are not in the text that a client sends back.
PLAIN = ("Hey", "One")


def user(content: str) -> Message:
    return {"role": "user", "content": content}


class Conversation:
    """A client of several gateways, by their names, that plays one session."""

    def __init__(self, clients: dict[str, openai.AsyncOpenAI], session: str, **headers: str) -> None:
        self.clients = clients
        self.session, self.headers = session, {"X-Session-ID": session, **headers}

    async def ask(self, at: str, messages: list[Message], request: str, seen: asyncio.Event | None = None) -> Message:
        """The answer to a chat, read from a stream. `seen` is set with its first text."""
        content = ""
        headers, sent = self.headers | {"X-Request-ID": request}, list[Any](messages)
        chunks = await self.clients[at].chat.completions.create(
            model="spell",
            messages=sent,
            max_tokens=COUNT,
            stream=True,
            extra_headers=headers,
        )
        async for chunk in chunks:
            content += chunk.choices[0].delta.content or ""
            if seen is not None and content:
                seen.set()
        return {"role": "assistant", "content": content}


async def call(stand: GatewayStand, at: str, method: str, path: str, **body: Any) -> dict[str, Any]:
    url = f"http://{stand.cluster.process[at].address}/v1/sessions/{path}"
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {TOKEN}"}, timeout=60) as client:
        answer = await client.request(method, url, json=body or None)
    assert answer.status_code == 200, answer.text
    read: dict[str, Any] = answer.json()
    return read


def assert_as_generated(trace: dict[str, Any]) -> None:
    """Each completion is what any engine makes of its prompt, and each of its tokens has mask 1 once."""
    sampled = 0
    for turn in trace["turns"]:
        for one in turn["completions"]:
            made = follow(SCRIPT, turn["prompt_token_ids"], COUNT)
            assert one["token_ids"] == [token for token, _ in made]
            assert one["logprobs"] == pytest.approx([logprob for _, logprob in made])
            assert [(one["version"], one["end"]) for one in one["weight_versions"]] == [("1", COUNT)]
            sampled += COUNT
    assert sum(sum(branch["loss_mask"]) for branch in trace["branches"]) == sampled
    for branch in trace["branches"]:
        versions, mask = np.array(branch["weight_versions"]), np.array(branch["sampled_mask"])
        assert versions.tolist() == mask.tolist()  # version 1 where a token was sampled, else 0
        assert not np.any(np.array(branch["logprobs"])[mask == 0])


async def trajectories(stand: GatewayStand, count: int) -> list[Trajectory]:
    """The first trajectories that the run's trainer gets."""
    found: list[Trajectory] = []
    async with aclosing(stand.lease.trajectories()) as stream:
        async for one in stream:
            found.append(one)
            if len(found) == count:
                break
    return found


async def test_a_session_goes_on_at_another_gateway_and_its_trace_is_what_the_engines_made(
    stand: GatewayStand,
) -> None:
    names = ("g1", "g2")
    clients = dict(zip(names, await asyncio.gather(*map(stand.gateway, names)), strict=True))
    talk = Conversation(clients, "episode 1", **{"X-Group-ID": "problem 7"})
    opening = [{"role": "system", "content": "Be brief."}, user("Hello")]
    first = [*opening, await talk.ask("g1", opening, "t1"), user("more")]
    seen = asyncio.Event()
    reading = asyncio.create_task(talk.ask("g1", first, "t2", seen))
    await seen.wait()
    stand.cluster.kill("g1")
    broken = (await asyncio.gather(reading, return_exceptions=True))[0]
    assert isinstance(broken, openai.APIError | httpx.HTTPError)

    answer = await talk.ask("g2", first, "t2")  # what was made before the kill, then the rest
    await talk.ask("g2", [*first, answer, user("left")], "t3")
    await talk.ask("g2", [*first, answer, user("right")], "t4")
    await talk.ask("g2", [*opening, {**first[2], "content": "edited"}, user("more")], "t5")
    await talk.ask("g2", [opening[0], user("summary"), answer, user("on")], "t6")

    trace = await call(stand, "g2", "GET", "episode 1")
    assert_as_generated(trace)
    assert [turn["matched_by"] for turn in trace["turns"][:4]] == ["first", *["continued"] * 3]
    assert [branch["turns"] for branch in trace["branches"]] == [[1, 2, 3], [1, 2, 4], [5], [6]]
    run = await stand.client.run(stand.run_id)
    assert run.counters["requests_submitted"] == 6

    ended = await call(stand, "g2", "POST", "episode 1/reward", reward=1.0)
    assert (ended["state"], ended["reward"]) == ("completed", 1.0)
    made = await trajectories(stand, 4)
    for one, branch in zip(made, trace["branches"], strict=True):
        assert unpack_ids(one.prompt_ids).tolist() == branch["prompt_token_ids"]
        assert unpack_tokens(one.tokens)["id"].tolist() == branch["token_ids"]
        assert list(one.loss_mask) == branch["loss_mask"]
    run = await stand.client.run(stand.run_id)
    assert run.counters["submitted"] == 6


async def test_rewards_of_a_group_of_sessions_become_a_batch_that_trains_each_token_once(stand: GatewayStand) -> None:
    clients = {"g1": await stand.gateway("g1")}
    for number, reward in enumerate((1.0, 0.0)):
        talk = Conversation(clients, f"episode {number}", **{"X-Group-ID": "problem 7"})
        chat = [user(PLAIN[number])]
        chat += [await talk.ask("g1", chat, "t1")]
        await asyncio.gather(*(talk.ask("g1", [*chat, user(way)], way) for way in ("left", "right")[: 2 - number]))
        await call(stand, "g1", "POST", f"{talk.session}/reward", reward=reward)
    batch = await trajectories(stand, 3)
    samples = samples_of(batch, TrainerSpec(normalize_std=False), seed=0, step=0)
    assert [sample.advantage for sample in samples] == [0.5, 0.5, -0.5]
    assert sum(int(sample.mask.sum()) for sample in samples) == 5 * COUNT
    for sample in samples:
        assert sample.mask[-COUNT:].all()  # the branch's last turn
        ids = sample.ids.tolist()
        made = follow(SCRIPT, ids[:-COUNT], COUNT)
        assert ids[-COUNT:] == [token for token, _ in made]
        assert sample.logprobs[-COUNT:].tolist() == pytest.approx([logprob for _, logprob in made])
