"""/v1/responses and /v1/messages: what agents' clients send, and what they read."""

import json
from pathlib import Path
from typing import Any

import anthropic
import httpx
import httpx2
import msgspec
import openai
import pytest
from starlette.applications import Starlette

from ebbtide.auth.credential_files import ReloadedFiles
from ebbtide.auth.security import TokenCheck
from ebbtide.gateway.access import KeyRing, RequestLimits
from ebbtide.gateway.http.app import make_app
from ebbtide.gateway.templates import TemplateSandbox
from ebbtide.types.rollout import FinishReason
from tests.fakes.scripted_app_state import scripted_app_state
from tests.fakes.scripted_rollouts import ScriptedCatalog, ScriptedSource, scripted_model, scripted_run
from tests.unit.gateway.http.conftest import SECRET
from tests.unit.gateway.http.test_chat import CALL, prompt_text

TOOL = {"type": "function", "name": "search", "parameters": {"type": "object"}, "strict": False}
IMAGE = {"type": "input_image"}
INPUT_TOOL = {"name": "search", "description": "Searches.", "input_schema": {"type": "object"}}


def named_events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, each of which has to bear its type as its name."""
    found = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = msgspec.json.decode(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


async def test_items_become_messages_of_the_chat(http: httpx.AsyncClient, source: ScriptedSource) -> None:
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules."}]},
        {"role": "user", "content": "weather?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "search", "arguments": '{"days": 3}'},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    ]
    answer = (await http.post("/v1/responses", json={"input": items, "instructions": "Be kind."})).json()
    assert prompt_text(source) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>system\nRules.<|im_end|>\n"
        "<|im_start|>user\nweather?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>{"name": "search", "arguments": {"days": 3}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>assistant\n"
    )
    (message,) = answer["output"]
    assert message["content"][0]["text"] == "Hello world"
    assert (answer["status"], answer["object"], answer["store"]) == ("completed", "response", False)


async def test_a_response_in_events_ends_as_the_whole_one(http: httpx.AsyncClient, source: ScriptedSource) -> None:
    source.answer = f"<think>Which days?</think>{CALL}"
    body = {"input": "weather?", "tools": [TOOL], "request_id": "one"}
    whole = (await http.post("/v1/responses", json=body)).json()
    streamed = named_events(await http.post("/v1/responses", json=body | {"stream": True, "request_id": "two"}))
    assert [event["sequence_number"] for event in streamed] == list(range(len(streamed)))
    assert streamed[0]["type"] == "response.created"
    last = streamed[-1]["response"]
    assert [item["type"] for item in last["output"]] == ["reasoning", "message", "function_call"]
    assert last["usage"] == whole["usage"]
    call = last["output"][2]
    assert (call["name"], call["arguments"]) == ("search", '{"days":3}')
    for one, other in zip(last["output"], whole["output"], strict=True):
        assert one.get("content") == other.get("content")


@pytest.mark.parametrize("answer", ["Hello 漢字 🎉", "half \ufffd"])
async def test_a_streams_logprobs_are_those_of_all_tokens(
    http: httpx.AsyncClient, source: ScriptedSource, answer: str
) -> None:
    source.answer, source.chunk = answer, 1  # so most chunks hold a part of a character
    body = {"input": "x", "include": ["message.output_text.logprobs"], "request_id": "one", "stop": ["zz"]}
    whole = (await http.post("/v1/responses", json=body)).json()
    streamed = named_events(await http.post("/v1/responses", json=body | {"stream": True, "request_id": "two"}))
    last, deltas = streamed[-1]["response"], [one for one in streamed if one["type"] == "response.output_text.delta"]
    expected = whole["output"][0]["content"][0]["logprobs"]
    assert len(expected) == whole["usage"]["output_tokens"] == last["usage"]["output_tokens"]
    assert last["output"][0]["content"][0]["logprobs"] == expected
    assert [one for delta in deltas for one in delta["logprobs"]] == expected


#: Bodies that agents send by default, without what a user may add. Each file says whence it is.
BODIES = {
    path.stem: msgspec.json.decode(path.read_bytes())
    for path in sorted((Path(__file__).parent / "agent_bodies").iterdir())
}


@pytest.mark.parametrize("prefix", ["", "/sessions/episode"])
@pytest.mark.parametrize("name", BODIES)
async def test_default_bodies_of_agents_are_taken(sandbox: TemplateSandbox, name: str, prefix: str) -> None:
    path, body = BODIES[name]["path"], BODIES[name]["body"]
    source = ScriptedSource(scripted_run(), scripted_model(sandbox, tools=True, context=40_000))
    keys = KeyRing(ReloadedFiles((), lambda: TokenCheck(f"Bearer {SECRET}")), None)
    transport = httpx.ASGITransport(make_app(scripted_app_state(ScriptedCatalog([source]), keys, RequestLimits())))
    headers = {"authorization": f"Bearer {SECRET}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=headers) as client:
        answer = await client.post(f"{prefix}{path}", json=body)
        assert (answer.status_code, "Hello world" in answer.text) == (200, True), answer.text
        if path == "/v1/messages":
            counted = {name: body[name] for name in ("model", "system", "messages", "tools", "thinking")}
            answer = await client.post(f"{prefix}/v1/messages/count_tokens", json=counted)
            assert (answer.status_code, answer.json()["input_tokens"] > 10) == (200, True), answer.text


async def test_calls_of_a_namespaces_functions_name_it(http: httpx.AsyncClient, source: ScriptedSource) -> None:
    source.answer = CALL
    cached = {"type": "web_search", "external_web_access": False}
    tools = [{"type": "namespace", "name": "web", "description": "Of the web.", "tools": [TOOL]}, cached]
    whole = (await http.post("/v1/responses", json={"input": "weather?", "tools": tools, "request_id": "one"})).json()
    streamed = named_events(
        await http.post(
            "/v1/responses", json={"input": "weather?", "tools": tools, "request_id": "two", "stream": True}
        )
    )
    assert "tools: 1" in prompt_text(source)
    for output in (whole["output"], streamed[-1]["response"]["output"]):
        (call,) = [item for item in output if item["type"] == "function_call"]
        assert (call["namespace"], call["name"]) == ("web", "search")
    history = [{"role": "user", "content": "weather?"}, *whole["output"]]
    history.append({"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"})
    assert (await http.post("/v1/responses", json={"input": history, "tools": tools})).status_code == 200


async def test_a_name_of_two_namespaces_is_refused(http: httpx.AsyncClient) -> None:
    tools = [{"type": "namespace", "name": name, "description": "", "tools": [TOOL]} for name in ("one", "two")]
    answer = await http.post("/v1/responses", json={"input": "x", "tools": [TOOL, tools[0]]})
    assert (answer.status_code, "'search'" in answer.json()["error"]["message"]) == (400, True)
    answer = await http.post("/v1/responses", json={"input": "x", "tools": tools})
    assert (answer.status_code, "'search'" in answer.json()["error"]["message"]) == (400, True)


async def test_functions_of_namespaces_are_counted_before_any_is_read(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = list[Any]()
    monkeypatch.setattr("ebbtide.gateway.dialects.chat.tool_function", lambda function, field: read.append(field))
    empty = list[dict[str, Any]]([{}] * 200)
    spaces = [{"type": "namespace", "name": name, "tools": empty} for name in ("one", "two")]
    answer = await http.post("/v1/responses", json={"input": "x", "tools": [TOOL, *spaces]})
    assert (answer.status_code, "401 functions" in answer.json()["error"]["message"]) == (400, True)
    assert not read


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"name": ""}, "tools[0].name"),
        ({"name": "x" * 129}, "tools[0].name"),
        ({"name": 3}, "tools[0].name"),
        ({"tools": "search"}, "tools[0].tools"),
        ({"tools": [TOOL, {"type": "custom"}]}, "tools[0].tools[1].type"),
    ],
)
async def test_what_is_no_namespace_is_named(http: httpx.AsyncClient, change: dict[str, Any], field: str) -> None:
    space = {"type": "namespace", "name": "x" * 128, "tools": [TOOL]}
    assert (await http.post("/v1/responses", json={"input": "x", "tools": [space]})).status_code == 200
    answer = await http.post("/v1/responses", json={"input": "x", "tools": [space | change]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


async def test_a_response_that_is_cut_says_so(http: httpx.AsyncClient) -> None:
    answer = (await http.post("/v1/responses", json={"input": "x", "max_output_tokens": 2})).json()
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_openai_client_reads_responses(app: Starlette, source: ScriptedSource, stream: bool) -> None:
    source.answer = CALL
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app)) as over:
        client = openai.AsyncOpenAI(base_url="http://gateway/v1", api_key=SECRET, http_client=over, max_retries=0)
        asked: Any = {"model": "spell", "input": "weather?", "tools": [TOOL]}
        if stream:
            async with client.responses.stream(**asked) as streamed:
                made = await streamed.get_final_response()
        else:
            made = await client.responses.create(**asked)
    assert made.output_text == "I look."
    (call,) = [item for item in made.output if item.type == "function_call"]
    assert json.loads(call.arguments) == {"days": 3}


async def test_blocks_become_messages_of_the_chat(http: httpx.AsyncClient, source: ScriptedSource) -> None:
    messages = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "search", "input": {"days": 3}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "text", "text": "and now?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    system = [{"type": "text", "text": "Be kind."}]
    body = {"max_tokens": 50, "messages": messages, "system": system}
    assert (await http.post("/v1/messages", json=body)).status_code == 200
    assert prompt_text(source) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nweather?<|im_end|>\n"
        '<|im_start|>assistant\nI look.<tool_call>{"name": "search", "arguments": {"days": 3}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>user\nand now?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_the_anthropic_client_reads_messages(app: Starlette, source: ScriptedSource, stream: bool) -> None:
    source.answer = f"<think>Which days?</think>{CALL}"
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app)) as over:
        client = anthropic.AsyncAnthropic(base_url="http://gateway", api_key=SECRET, http_client=over, max_retries=0)
        asked: Any = {"model": "spell", "max_tokens": 90, "tools": [INPUT_TOOL]}
        asked["messages"] = [{"role": "user", "content": "weather?"}]
        if stream:
            async with client.messages.stream(**asked) as streamed:
                made = await streamed.get_final_message()
        else:
            made = await client.messages.create(**asked)
    assert [block.type for block in made.content] == ["thinking", "text", "tool_use"]
    call = made.content[2]
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("search", {"days": 3})
    assert made.stop_reason == "tool_use"
    assert made.usage.output_tokens == len(source.ids(next(iter(source.submitted)))[0])


async def test_a_stop_sequence_is_named(http: httpx.AsyncClient) -> None:
    body = {"max_tokens": 50, "messages": [{"role": "user", "content": "x"}], "stop_sequences": ["lo w"]}
    answer = (await http.post("/v1/messages", json=body)).json()
    assert answer["content"] == [{"type": "text", "text": "Hel"}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "lo w")


async def test_thinking_reaches_the_template_and_a_budget_is_refused(http: httpx.AsyncClient) -> None:
    body = {"max_tokens": 50, "messages": [{"role": "user", "content": "x"}]}
    assert (await http.post("/v1/messages", json=body | {"thinking": {"type": "adaptive"}})).status_code == 200
    for enough in (49, 2048):  # of `max_tokens`: it bounds nothing
        free = {"thinking": {"type": "enabled", "budget_tokens": enough}}
        assert (await http.post("/v1/messages", json=body | free)).status_code == 200
    budget = {"thinking": {"type": "enabled", "budget_tokens": 20}}
    refused = await http.post("/v1/messages", json=body | budget)
    assert refused.status_code == 400
    assert refused.json()["type"] == "error"
    assert "thinking.budget_tokens" in refused.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_messages_may_have_more_tokens_than_the_context_leaves(
    http: httpx.AsyncClient, source: ScriptedSource, stream: bool
) -> None:
    """Clients have to name a bound, and know no context: litellm asks for 128,000 tokens."""
    body = {"max_tokens": 128_000, "messages": [{"role": "user", "content": "x"}], "stream": stream}
    answer = await http.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    assert "end_turn" in answer.text
    (rollout,) = source.submitted.values()
    assert rollout.sampling.max_tokens == source.model.context - len(memoryview(rollout.prompt_ids).cast("I"))


@pytest.mark.parametrize("max_tokens", [3, 128_000])
async def test_an_answer_that_is_cut_ends_by_max_tokens_even_where_the_context_cut_it(
    http: httpx.AsyncClient, source: ScriptedSource, max_tokens: int
) -> None:
    """Clients know no other reason: verifiers scores an answer that ends by one of the context's own as whole."""
    source.chunk, source.break_off = 3, FinishReason.LENGTH
    body = {"max_tokens": max_tokens, "messages": [{"role": "user", "content": "x"}]}
    assert (await http.post("/v1/messages", json=body)).json()["stop_reason"] == "max_tokens"
    streamed = named_events(await http.post("/v1/messages", json=body | {"stream": True}))
    assert streamed[-2]["delta"]["stop_reason"] == "max_tokens"


async def test_tokens_of_messages_are_counted(http: httpx.AsyncClient) -> None:
    body = {"messages": [{"role": "user", "content": "x"}]}
    counted = (await http.post("/v1/messages/count_tokens", json=body)).json()["input_tokens"]
    answered = (await http.post("/v1/messages", json=body | {"max_tokens": 9})).json()["usage"]["input_tokens"]
    assert counted == answered


@pytest.mark.parametrize(
    ("url", "body", "field"),
    [
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        ("/v1/responses", {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ("/v1/responses", {"input": [{"role": "user", "content": "x", "mood": "x"}]}, "input[0].mood"),
        ("/v1/responses", {"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ("/v1/responses", {"input": "x", "tools": [{"type": "web_search", "external_web_access": 0}]}, "tools[0].type"),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_object"}}}, "text.format.type"),
        ("/v1/responses", {"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0].type",
        ),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
        ("/v1/messages", {"messages": [], "tool_choice": {"type": "any"}}, "messages"),
    ],
)
async def test_what_is_not_served_is_named(http: httpx.AsyncClient, url: str, body: dict[str, Any], field: str) -> None:
    answer = await http.post(url, json=body | ({"max_tokens": 9} if url == "/v1/messages" else {}))
    assert answer.status_code == 400
    assert field in answer.json()["error"]["message"]
