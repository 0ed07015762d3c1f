"""Sessions over HTTP: traces are what was sampled, whatever clients do, and gateways take over from each other."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any, cast

import httpx
import numpy as np
import pytest
from msgspec.structs import replace
from starlette.applications import Starlette

from ebbtide.errors import NoCapacity
from ebbtide.gateway.access import SessionLimits
from ebbtide.gateway.http import session_routes
from ebbtide.gateway.http.app import make_app
from ebbtide.gateway.http.route import AppState
from ebbtide.gateway.runs import RunCatalog, RunDirectory
from ebbtide.gateway.sessions import ending, live, turn_player
from ebbtide.gateway.sessions.turn_player import SessionCache
from ebbtide.gateway.templates import TemplateSandbox
from ebbtide.types.run import EnvironmentSpec
from ebbtide.types.session import SessionState
from ebbtide.types.tokens import TOKEN, TokenArray, unpack_ids, unpack_tokens
from tests.fakes.scripted_rollouts import KEEPS_HISTORY, ScriptedCatalog, ScriptedSource, scripted_model, scripted_run
from tests.support.waiting import wait_until
from tests.unit.gateway.http.conftest import HEADERS

Message = dict[str, Any]
CALL = '<think>hm</think>I look.<tool_call>{"name": "search", "arguments": {"q": "x"}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]


def user(content: str) -> Message:
    return {"role": "user", "content": content}


class Agent:
    """A client of any of several gateways, which share what the coordinator has."""

    def __init__(self, apps: list[Starlette], name: str = "episode-1", **headers: str) -> None:
        self.clients = [
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway", headers=HEADERS)
            for app in apps
        ]
        self.name, self.headers = name, {"x-session-id": name, **headers}

    async def ask(self, messages: list[Message], *, at: int = 0, **body: Any) -> Message:
        """The answer to a chat, which must succeed."""
        answer = await self.post(messages, at=at, **body)
        assert answer.status_code == 200, answer.text
        message: Message = answer.json()["choices"][0]["message"]
        return message

    async def post(self, messages: list[Message], *, at: int = 0, request: str = "", **body: Any) -> httpx.Response:
        headers = self.headers | ({"x-request-id": request} if request else {})
        sent = {"messages": messages, "max_tokens": 60, **body}
        return await self.clients[at].post("/v1/chat/completions", json=sent, headers=headers)

    async def trace(self, at: int = 0) -> dict[str, Any]:
        answer = await self.clients[at].get(f"/v1/sessions/{self.name}")
        assert answer.status_code == 200, answer.text
        body: dict[str, Any] = answer.json()
        return body

    async def end(self, how: str = "reward", **body: Any) -> httpx.Response:
        return await self.clients[0].post(f"/v1/sessions/{self.name}/{how}", json=body)


def another_gateway(state: AppState, catalog: ScriptedCatalog) -> Starlette:
    directory = RunDirectory(cast("RunCatalog", catalog), max_prompt_tokens=state.limits.prompt_tokens)
    cache = SessionCache(state.session_limits.shelf_bytes)
    return make_app(replace(state, directory=directory, cache=cache))


@pytest.fixture
def source(sandbox: TemplateSandbox) -> ScriptedSource:
    return ScriptedSource(scripted_run(), scripted_model(sandbox, tools=True, template=KEEPS_HISTORY))


@pytest.fixture
def agent(app: Starlette, state: AppState, catalog: ScriptedCatalog) -> Agent:
    return Agent([app, another_gateway(state, catalog)])


def takes_sessions(source: ScriptedSource) -> None:
    spec = replace(source.run.spec, environment=EnvironmentSpec(name="agents"))
    source.run = replace(source.run, spec=spec)


def assert_as_sampled(trace: dict[str, Any], source: ScriptedSource) -> None:
    """Each completion is what the ledger has, behind the prompt that was submitted; each token is trained once."""
    counted = 0
    for turn in trace["turns"]:
        for one in turn["completions"]:
            assert one["token_ids"] == source.ids(one["id"])[0]
            assert turn["prompt_token_ids"] == unpack_ids(source.submitted[one["id"]].prompt_ids).tolist()
            counted += len(one["token_ids"])
    masks = [branch["loss_mask"] for branch in trace["branches"]]
    assert sum(map(sum, masks)) == counted
    assert sum(len(turn["completions"]) for turn in trace["turns"]) == len(source.submitted)


async def test_a_trace_is_shaped_away_from_the_event_loop(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = list[threading.Thread]()

    def versions(_tokens: TokenArray) -> list[Any]:
        threads.append(threading.current_thread())
        return []

    await agent.ask([user("hello")])
    monkeypatch.setattr(session_routes, "version_spans", versions)
    await agent.trace()
    listed = (await agent.clients[0].get(f"/v1/sessions/{agent.name}/completions")).json()
    assert [one["turn"] for one in listed["data"]] == [1]
    assert len(threads) == 2
    assert threading.main_thread() not in threads


async def test_a_conversation_is_one_branch_of_the_very_tokens_that_were_sampled(
    agent: Agent, source: ScriptedSource
) -> None:
    source.answers = ["Hello", CALL, "Done"]
    chat = [user("Hi")]
    for words in ("more", "and more", ""):
        chat += [await agent.ask(chat, tools=TOOLS), user(words)]
    trace = await agent.trace()
    assert_as_sampled(trace, source)
    assert [turn["parent"] for turn in trace["turns"]] == [None, *({"turn": n, "completion": 0} for n in (1, 2))]
    assert len(trace["branches"]) == 1
    assert (trace["turn_count"], trace["state"], trace["unmatched_tokens"]) == (3, "open", 0)


async def test_another_gateway_goes_on_with_turns_that_it_did_not_answer(agent: Agent, source: ScriptedSource) -> None:
    source.answers = ["Hello", CALL, "Done", "Again"]
    chat = [user("Hi")]
    for number, words in enumerate(("more", "and more", "further", "")):
        chat += [await agent.ask(chat, at=number % 2, tools=TOOLS), user(words)]
    traces = [await agent.trace(at) for at in (0, 1)]
    assert traces[0] == traces[1]
    assert_as_sampled(traces[0], source)
    assert len(traces[0]["branches"]) == 1


async def test_a_trace_is_read_page_by_page(agent: Agent) -> None:
    for number in range(3):
        await agent.ask([user(f"question {number}")])
    whole, client, path = await agent.trace(), agent.clients[1], f"/v1/sessions/{agent.name}"
    assert not whole["has_more"]
    pages = [(await client.get(path, params={"limit": 2, "after": after})).json() for after in (0, 2)]
    assert [[turn["number"] for turn in page["turns"]] for page in pages] == [[1, 2], [3]]
    assert [page["has_more"] for page in pages] == [True, False]
    assert [branch for page in pages for branch in page["branches"]] == whole["branches"]
    await agent.ask([user("question 3")])
    again = (await client.get(path, params={"after": 2, "until": pages[0]["until"]})).json()
    assert (again["turns"], again["branches"], again["until"]) == (pages[1]["turns"], pages[1]["branches"], 3)
    listed = (await client.get(f"{path}/completions", params={"limit": 1, "after": 1})).json()
    assert ([one["turn"] for one in listed["data"]], listed["has_more"]) == ([2], True)
    for wrong in ({"limit": 0}, {"limit": 1001}, {"limit": "x"}, {"after": -1}, {"until": "x"}):
        refused = await client.get(path, params=wrong)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith(f"{next(iter(wrong))}: must be a")


def has_verifiers(source: ScriptedSource, default: str = "") -> None:
    verifiers = {"exact": "checks:exact", "close": "checks:close"}
    environment = EnvironmentSpec(name="agents", verifiers=verifiers, verifier=default)
    source.run = replace(source.run, spec=replace(source.run.spec, environment=environment))


async def test_a_session_may_end_with_a_verifier_and_waits_for_its_verdict(
    app: Starlette, state: AppState, catalog: ScriptedCatalog, source: ScriptedSource
) -> None:
    has_verifiers(source)
    agent = Agent([app, another_gateway(state, catalog)], **{"x-group-id": "problem-1"})
    await agent.ask([user("hello")])
    ended = (await agent.end("end", verifier="exact", data={"answer": "x"})).json()
    assert (ended["state"], ended["verifier"], ended["reward"]) == ("verifying", "exact", None)
    assert list(source.verifier_data.values()) == [b'{"answer":"x"}']
    assert len(source.trajectories) == 1
    assert (await agent.end("end", verifier="exact")).json()["state"] == "verifying", "a repeat"
    for how, body in (("end", {"verifier": "close"}), ("reward", {"reward": 1.0}), ("end", {"drop_reason": "x"})):
        refused = await agent.end(how, **body)
        assert refused.status_code == 409
        assert "with verifier exact" in refused.json()["error"]["message"]
    assert (await agent.post([user("hello")], request="again")).status_code == 409
    (name,) = source.stored
    session, turns = source.stored[name]
    source.stored[name] = (replace(session, state=SessionState.COMPLETED, reward=0.5), turns)
    told = await agent.trace(at=1)
    assert (told["state"], told["reward"], told["turns"]) == ("completed", 0.5, None)


async def test_an_unknown_verifier_is_refused_at_once_with_the_names_of_those_that_are_there(
    app: Starlette, source: ScriptedSource
) -> None:
    agent = Agent([app], **{"x-group-id": "problem-1"})
    takes_sessions(source)
    await agent.ask([user("hello")])
    for body, part in (
        ({"verifier": "other"}, "verifier: the run has no verifier 'other'; its verifiers: none"),
        ({}, "verifier: is required, or a reward"),
        ({"reward": 1.0, "data": {"x": 1}}, "data: is for a verifier"),
        ({"verifier": "exact", "reward": 1.0}, "reward: give a reward, a drop_reason or a verifier"),
    ):
        refused = await agent.end("end", **body)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith(part)
    has_verifiers(source)
    assert "its verifiers: close, exact" in (await agent.end("end", verifier="other")).text
    assert (await agent.trace())["state"] == "open"
    has_verifiers(source, default="close")
    assert (await agent.end("end")).json()["verifier"] == "close"


async def test_forks_edits_and_compacted_histories_become_branches_with_their_own_masks(
    agent: Agent, source: ScriptedSource
) -> None:
    source.answers = ["one", "two", "three", "four", "five"]
    first = [user("Hi"), await agent.ask([user("Hi")])]
    await agent.ask([*first, user("left")], at=1)
    await agent.ask([*first, user("right")])
    await agent.ask([user("Hi"), {**first[1], "content": "edited"}, user("left")], at=1)
    await agent.ask([user("summary of all")])
    trace = await agent.trace()
    assert_as_sampled(trace, source)
    assert [branch["turns"] for branch in trace["branches"]] == [[1, 2], [1, 3], [4], [5]]
    assert trace["unknown_answers"] == 1


async def test_a_repeat_of_a_request_plays_the_stored_turn_at_any_gateway(agent: Agent, source: ScriptedSource) -> None:
    answers = [(await agent.post([user("Hi")], at=at, request="turn-1")).json() for at in (0, 1, 0)]
    assert len({str(answer["choices"]) for answer in answers}) == 1
    assert len(source.submitted) == 1
    assert (await agent.trace())["turn_count"] == 1
    other = await agent.post([user("Other")], at=1, request="turn-1")
    assert (other.status_code, "X-Request-ID" in other.text) == (409, True)


async def test_a_turn_whose_gateway_died_before_it_submitted_is_submitted_by_the_next(
    agent: Agent, source: ScriptedSource
) -> None:
    await agent.post([user("Hi")], request="turn-1")
    submitted = dict(source.submitted)
    source.submitted.clear()
    source.answers = ["Hello world"]
    assert (await agent.trace(at=1))["turns"][0]["completions"][0]["token_ids"] == []
    await agent.post([user("Hi")], at=1, request="turn-1")
    assert source.submitted == submitted
    assert_as_sampled(await agent.trace(at=1), source)


async def test_two_gateways_that_add_turns_at_once_agree_on_their_order(agent: Agent, source: ScriptedSource) -> None:
    await asyncio.gather(*(agent.ask([user(f"number {number}")], at=number % 2) for number in range(6)))
    traces = [await agent.trace(at) for at in (0, 1)]
    assert traces[0] == traces[1]
    assert_as_sampled(traces[0], source)


async def test_prompts_of_ids_and_texts_go_on_where_they_repeat_a_path(agent: Agent, source: ScriptedSource) -> None:
    client, headers = agent.clients[0], agent.headers
    body = {"prompt": [5, 6, 7], "max_tokens": 60, "return_token_ids": True}
    first = (await client.post("/v1/completions", json=body, headers=headers)).json()["choices"][0]
    body["prompt"] = [5, 6, 7, *first["token_ids"], 9]
    assert (await agent.clients[1].post("/v1/completions", json=body, headers=headers)).status_code == 200
    trace = await agent.trace()
    assert_as_sampled(trace, source)
    assert len(trace["branches"]) == 1
    assert trace["turns"][1]["prompt_mask"] == [0] * 3 + [1] * len(first["token_ids"]) + [0]


async def test_a_session_in_the_path_is_the_same_as_one_in_the_header(agent: Agent, source: ScriptedSource) -> None:
    path = "/sessions/episode-1/v1/chat/completions"
    answer = await agent.clients[0].post(path, json={"messages": [user("Hi")]})
    message = answer.json()["choices"][0]["message"]
    await agent.ask([user("Hi"), message, user("more")])
    assert (await agent.trace())["turn_count"] == 2


async def test_a_sessions_id_has_no_slash_and_no_escaped_one_parts_a_path(agent: Agent, source: ScriptedSource) -> None:
    takes_sessions(source)
    agent.headers["x-group-id"] = "problem 7"
    await agent.ask([user("Hi")])
    client = agent.clients[0]
    rewarded = await client.post("/v1/sessions/episode-1%2Freward", json={"reward": 1.0})
    assert (rewarded.status_code, source.trajectories) == (404, [])
    assert (await client.post("/v1/sessions", json={"session_id": "a/b"})).json()["error"]["param"] == "session_id"
    agent.headers["x-session-id"] = "a/b"
    assert (await agent.post([user("Hi")])).status_code == 400
    assert len(source.stored) == 1


async def test_a_reward_makes_each_branch_a_trajectory_of_the_sessions_group(
    agent: Agent, source: ScriptedSource
) -> None:
    takes_sessions(source)
    agent.headers["x-group-id"] = "problem 7"
    source.answers = ["one", "two", "three"]
    first = [user("Hi"), await agent.ask([user("Hi")])]
    await agent.ask([*first, user("left")])
    await agent.ask([*first, user("right")], at=1)
    trace = await agent.trace()
    ended = await agent.end(reward=0.5)
    assert (ended.status_code, ended.json()["state"], ended.json()["group_id"]) == (200, "completed", "problem 7")
    assert [len(source.trajectories), trace["turn_count"]] == [2, 3]
    for made, branch in zip(source.trajectories, trace["branches"], strict=True):
        tokens = unpack_tokens(made.tokens)
        assert tokens["id"].tolist() == branch["token_ids"]
        assert list(made.loss_mask) == branch["loss_mask"]
        assert tokens["version"].tolist() == branch["weight_versions"]
        assert np.allclose(tokens["logprob"], branch["logprobs"])
        assert (made.reward, made.group_size, made.branches) == (0.5, source.run.spec.batch.group_size, 2)
    assert len({(one.session_id, one.group_id) for one in source.trajectories}) == 1
    assert [one.rollouts for one in source.trajectories] == [2, 1]
    assert (await agent.end(reward=0.5)).json() == ended.json()
    assert (await agent.end(reward=1.0)).status_code == 409
    late = await agent.post([user("more")], at=1)
    assert (late.status_code, "has ended" in late.text) == (409, True)
    for at in (0, 1):
        after = await agent.trace(at)
        assert (after["state"], after["reward"], after["turns"]) == ("completed", 0.5, None)
        assert (await agent.clients[at].get("/v1/sessions/episode-1/completions")).status_code == 404


async def test_a_reward_stops_what_is_under_way_and_counts_it_as_far_as_it_came(
    agent: Agent, source: ScriptedSource
) -> None:
    takes_sessions(source)
    agent.headers["x-group-id"] = "problem 7"
    source.gate.clear()
    asking = asyncio.create_task(agent.post([user("Hi")]))
    await source.first.wait()
    ending = asyncio.create_task(agent.end(reward=1.0))
    await wait_until(lambda: bool(source.cancelled))
    source.gate.set()
    assert (await ending).json()["state"] == "completed"
    assert (await asking).status_code == 503
    (made,) = source.trajectories
    assert len(made.tokens) == source.chunk * TOKEN.itemsize


async def test_a_reward_counts_what_was_said_before_a_last_turn_that_was_refused(
    agent: Agent, source: ScriptedSource
) -> None:
    takes_sessions(source)
    agent.headers["x-group-id"] = "problem 7"
    chat = [user("Hi"), await agent.ask([user("Hi")]), user("more")]
    source.refusal = NoCapacity("the run's queue is full", retry_after_s=1.0)
    assert (await agent.post(chat)).status_code == 429
    assert len((await agent.trace(at=1))["branches"]) == 1
    assert (await agent.end(reward=1.0)).json()["state"] == "completed"
    (made,) = source.trajectories
    assert (made.reward, made.loss_mask.count(1)) == (1.0, len(unpack_tokens(made.tokens)))


async def test_a_submit_that_waits_holds_no_other_request_of_its_session_back(
    agent: Agent, source: ScriptedSource
) -> None:
    source.acknowledges.clear()
    asking = asyncio.create_task(agent.post([user("Hi")]))
    await source.asked.wait()
    async with asyncio.timeout(60):
        assert len((await agent.trace())["turns"]) == 1
    assert not asking.done()
    source.acknowledges.set()
    assert (await asking).status_code == 200


async def test_only_runs_that_take_sessions_take_rewards_and_only_of_groups(
    agent: Agent, source: ScriptedSource
) -> None:
    await agent.ask([user("Hi")])
    refused = await agent.end(reward=1.0)
    assert (refused.status_code, "agents" in refused.text) == (400, True)
    takes_sessions(source)
    refused = await agent.end(reward=1.0)
    assert (refused.status_code, "X-Group-ID" in refused.text) == (400, True)
    assert not source.trajectories
    dropped = await agent.end("end", drop_reason="gave_up")
    assert (dropped.json()["state"], dropped.json()["drop_reason"]) == ("dropped", "gave_up")
    assert (await agent.end("end", drop_reason="gave_up")).status_code == 200


@pytest.mark.parametrize("body", [{}, {"reward": 1.0, "drop_reason": "x"}, {"drop_reason": "a b"}, {"verifier": "v"}])
async def test_an_end_that_says_nothing_clear_is_refused(agent: Agent, body: dict[str, Any]) -> None:
    await agent.ask([user("Hi")])
    assert (await agent.end("end", **body)).status_code == 400


async def test_sessions_of_others_and_unknown_ones_are_not_there(agent: Agent, source: ScriptedSource) -> None:
    await agent.ask([user("Hi")])
    ((stored, (session, turns)),) = source.stored.items()
    source.stored[stored] = (replace(session, owner="another"), turns)
    for path in ("episode-1", "episode-1/completions", "nothing"):
        assert (await agent.clients[1].get(f"/v1/sessions/{path}")).status_code == 404
    assert (await agent.end(reward=1.0)).status_code == 404
    assert (await agent.clients[0].get("/v1/sessions")).json()["data"] == []


async def test_a_key_sees_its_sessions_by_the_names_that_it_gave(agent: Agent) -> None:
    opened = await agent.clients[0].post("/v1/sessions", json={"session_id": "a b", "group_id": "g"})
    assert opened.json()["state"] == "open"
    await agent.ask([user("Hi")])
    page = (await agent.clients[1].get("/v1/sessions")).json()
    assert [(one["id"], one["group_id"]) for one in page["data"]] == [("episode-1", None), ("a b", "g")]
    rest = (await agent.clients[1].get("/v1/sessions?offset=1")).json()
    assert [one["id"] for one in rest["data"]] == ["a b"]
    completions = (await agent.clients[1].get("/v1/sessions/episode-1/completions")).json()["data"]
    assert [one["turn"] for one in completions] == [1]


async def test_a_list_continues_after_a_session_though_others_are_opened(agent: Agent) -> None:
    client = agent.clients[0]
    for name in ("first", "second", "third"):
        assert (await client.post("/v1/sessions", json={"session_id": name})).status_code == 200
    await client.post("/v1/sessions", json={"session_id": "fourth"})
    for after, wanted in (("third", ["second", "first"]), ("first", [])):
        page = (await client.get("/v1/sessions", params={"after": after})).json()
        assert ([one["id"] for one in page["data"]], page["has_more"]) == (wanted, False)
    forgotten = await client.get("/v1/sessions", params={"after": "unknown"})
    assert (forgotten.status_code, "after" in forgotten.text) == (404, True), "an empty last page would end the list"


async def test_sessions_stay_within_their_limits(
    agent: Agent, source: ScriptedSource, session_limits: SessionLimits
) -> None:
    for number in range(session_limits.turns):
        await agent.ask([user(str(number))])
    full = await agent.post([user("more")])
    assert (full.status_code, "X-Session-ID" in full.text) == (400, True)
    for number in range(1, session_limits.per_key):
        agent.headers["x-session-id"] = f"other-{number}"
        await agent.ask([user("Hi")])
    agent.headers["x-session-id"] = "one too many"
    assert (await agent.post([user("Hi")])).status_code == 429
    assert (await agent.end("end", drop_reason="enough")).status_code == 200
    assert (await agent.post([user("Hi")])).status_code == 200


async def test_a_session_has_one_prompt_a_request_and_stays_in_its_group(agent: Agent) -> None:
    body = {"prompt": ["a", "b"]}
    several = await agent.clients[0].post("/v1/completions", json=body, headers=agent.headers)
    assert (several.status_code, "one prompt" in several.text) == (400, True)
    await agent.ask([user("Hi")])
    agent.headers["x-group-id"] = "late"
    assert (await agent.post([user("Hi")])).status_code == 400
    alone = await agent.clients[0].post("/v1/completions", json={"prompt": "a"}, headers={"x-group-id": "g"})
    assert alone.status_code == 400


async def test_a_session_that_ended_and_was_forgotten_does_not_begin_again(
    agent: Agent, source: ScriptedSource
) -> None:
    await agent.ask([user("Hi")])
    source.forget()
    for at in (0, 1):
        late = await agent.post([user("more")], at=at)
        assert (late.status_code, "has ended" in late.text) == (409, True)


async def test_books_beyond_the_bound_are_read_again(state: AppState, source: ScriptedSource) -> None:
    small = replace(state, cache=SessionCache(kept_bytes=1))
    agents = [Agent([make_app(small)], f"episode-{number}") for number in range(3)]
    source.answers = [f"answer {number}" for number in range(6)]
    chats = [[user("Hi"), await agent.ask([user("Hi")]), user("more")] for agent in agents]
    for agent, chat in zip(agents, chats, strict=True):
        await agent.ask(chat)
        assert len((await agent.trace())["branches"]) == 1
    assert len(small.cache) <= 1


async def left(
    agent: Agent, source: ScriptedSource, messages: list[Message], *, goes_on: bool = True, **more: Any
) -> None:
    """A client that leaves once the first tokens of its answer are there. `goes_on`: the answer ends then."""
    source.gate.clear()
    source.first.clear()
    asking = asyncio.create_task(agent.post(messages, **more))
    await source.first.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    if goes_on:
        source.gate.set()


async def test_what_a_client_left_under_an_id_goes_on_and_is_read_by_the_next_turn(
    agent: Agent, source: ScriptedSource
) -> None:
    await left(agent, source, [user("Hi")], request="turn-1")
    await agent.ask([user("Hi")])
    trace = await agent.trace()
    assert_as_sampled(trace, source)
    assert trace["turn_count"] == 2
    assert not source.cancelled
    assert next(iter(source.stored.values()))[0].state is SessionState.OPEN


async def test_what_a_client_left_without_an_id_ends_and_is_not_trained_on(
    agent: Agent, source: ScriptedSource
) -> None:
    takes_sessions(source)
    agent.headers["x-group-id"] = "problem 7"
    chat = [user("Hi"), await agent.ask([user("Hi")]), user("more")]
    await left(agent, source, chat)
    (abandoned,) = source.cancelled
    await agent.ask(chat, at=1)  # as the client's library tries again
    for at in (0, 1):
        trace = await agent.trace(at)
        assert [[one["delivered"] for one in turn["completions"]] for turn in trace["turns"]] == [
            [True], [False], [True],
        ]  # fmt: skip
        assert trace["turns"][1]["completions"][0]["id"] == abandoned
        assert len(trace["turns"][1]["completions"][0]["token_ids"]) == source.chunk
        assert [branch["turns"] for branch in trace["branches"]] == [[1, 3]]
    assert (await agent.end(reward=1.0)).json()["state"] == "completed"
    (made,) = source.trajectories
    assert (made.rollouts, made.metrics["turns"]) == (2, 3.0)


async def test_a_last_turn_that_nobody_got_takes_nothing_from_the_branch_that_it_follows(
    agent: Agent, source: ScriptedSource
) -> None:
    chat = [user("Hi"), await agent.ask([user("Hi")]), user("more")]
    await left(agent, source, chat)
    assert [branch["turns"] for branch in (await agent.trace(at=1))["branches"]] == [[1]]


async def test_a_cancel_that_came_before_a_submit_is_repeated_until_the_session_can_end(
    agent: Agent, source: ScriptedSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    takes_sessions(source)
    agent.headers["x-group-id"] = "problem 7"
    monkeypatch.setattr(ending, "_AGAIN_S", 0.02)
    cancel, came = source.cancel_rollouts, list[int]()

    async def late(rollout_ids: Sequence[str], reason: str = "") -> None:
        came.append(len(rollout_ids))
        if len(came) > 1:
            await cancel(rollout_ids, reason)
            source.gate.set()  # what is cancelled says so

    monkeypatch.setattr(source, "cancel_rollouts", late)
    source.gate.clear()
    asking = asyncio.create_task(agent.post([user("Hi")]))
    await source.first.wait()
    async with asyncio.timeout(30):
        assert (await agent.end(reward=1.0)).json()["state"] == "completed"
    assert len(came) >= 2
    await asyncio.gather(asking, return_exceptions=True)


async def test_completions_that_run_on_hold_no_finished_one_back(
    agent: Agent, source: ScriptedSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_player, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(live, "_HELD_S", 0.1)
    source.answer = "Hello world, and much more than a chunk"
    await left(agent, source, [user("Hi")], request="long", n=40, goes_on=False)
    source.answers = ["ok"]
    assert len(await agent.ask([user("short")]))

    async def turns_once_the_short_one_is_read() -> Any:
        turns = (await agent.trace(at=1))["turns"]
        return turns if all(one["token_ids"] for one in turns[1]["completions"]) else None

    turns = await wait_until(turns_once_the_short_one_is_read)
    assert not any(one["token_ids"] for one in turns[0]["completions"])
    source.gate.set()
