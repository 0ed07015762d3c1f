"""/v1/chat/completions: messages and tools in, content, reasoning and calls out, whole and in events."""

import json
from typing import Any

import httpx
import httpx2
import openai
import pytest
from starlette.applications import Starlette

from tests.fakes.scripted_rollouts import ScriptedSource
from tests.unit.gateway.http.conftest import SECRET
from tests.unit.gateway.http.test_completions import events

URL = "/v1/chat/completions"
HELLO = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hello"}]
SEARCH = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}
CALL = 'I look.<tool_call>{"name": "search", "arguments": {"days": 3}}</tool_call>'


def prompt_text(source: ScriptedSource, number: int = 0) -> str:
    ids = memoryview(list(source.submitted.values())[number].prompt_ids).cast("I").tolist()
    return source.model.decode(ids, skip_special=False)


async def test_the_models_template_renders_the_messages(http: httpx.AsyncClient, source: ScriptedSource) -> None:
    answer = (await http.post(URL, json={"messages": HELLO, "return_token_ids": True})).json()
    expected = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_text(source) == expected
    assert answer["prompt_token_ids"] == source.model.encode(expected, special=False)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "Hello world"}
    assert answer["choices"][0]["token_ids"] == source.ids(next(iter(source.submitted)))[0]
    room = source.model.context - len(answer["prompt_token_ids"])
    assert next(iter(source.submitted.values())).sampling.max_tokens == room


async def test_parts_and_developers_become_what_templates_know(http: httpx.AsyncClient, source: ScriptedSource) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "developer", "content": "Rules."}, {"role": "user", "content": parts}]
    assert (await http.post(URL, json={"messages": messages})).status_code == 200
    assert prompt_text(source).startswith("<|im_start|>system\nRules.<|im_end|>\n<|im_start|>user\none\ntwo<|im_end|>")


async def test_reasoning_and_calls_are_told_from_content(http: httpx.AsyncClient, source: ScriptedSource) -> None:
    source.answer = f"<think>Which days?</think>{CALL}"
    answer = (await http.post(URL, json={"messages": HELLO, "tools": [SEARCH]})).json()
    (choice,) = answer["choices"]
    message = choice["message"]
    assert (message["content"], message["reasoning"]) == ("I look.", "Which days?")
    assert message["tool_calls"][0]["function"] == {"name": "search", "arguments": '{"days":3}'}
    assert message["tool_calls"][0]["id"].startswith("call_")
    assert choice["finish_reason"] == "tool_calls"
    assert "tools: 1" in prompt_text(source)


async def test_what_the_openai_clients_helper_gave_comes_back(app: Starlette, source: ScriptedSource) -> None:
    source.answers = [CALL, "Sunny."]
    asked: Any = {"model": "spell", "tools": [SEARCH]}
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app)) as over:
        client = openai.AsyncOpenAI(base_url="http://gateway/v1", api_key=SECRET, http_client=over, max_retries=0)
        messages: list[Any] = [{"role": "user", "content": "weather?"}]
        async with client.chat.completions.stream(messages=messages, **asked) as stream:
            answer = (await stream.get_final_completion()).choices[0].message
        assert answer.tool_calls
        messages += [answer, {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "sunny"}]
        made = await client.chat.completions.create(messages=messages, **asked)
    assert made.choices[0].message.content == "Sunny."


async def test_a_stream_tells_calls_as_they_come(http: httpx.AsyncClient, source: ScriptedSource) -> None:
    source.answer = f"<think>Which days?</think>{CALL}"
    body = {"messages": HELLO, "tools": [SEARCH], "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(await http.post(URL, json=body))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert not any("role" in delta for delta in deltas[1:])
    assert "".join(delta.get("content", "") for delta in deltas) == "I look."
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "Which days?"
    (call,) = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert (call["index"], call["type"], call["function"]["name"]) == (0, "function", "search")
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + last["usage"]["completion_tokens"]


async def test_without_a_choice_of_tools_marks_of_calls_are_text(
    http: httpx.AsyncClient, source: ScriptedSource
) -> None:
    source.answer = CALL
    body = {"messages": HELLO, "tools": [SEARCH], "tool_choice": "none"}
    (choice,) = (await http.post(URL, json=body)).json()["choices"]
    assert choice["message"]["content"] == CALL
    assert choice["finish_reason"] == "stop"


async def test_a_history_with_calls_goes_back_as_it_was_written(
    http: httpx.AsyncClient, source: ScriptedSource
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": '{"days": 3}'}}
    broken = {"id": "c2", "type": "function", "function": {"name": "search", "arguments": "{days"}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call, broken]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    assert (await http.post(URL, json={"messages": messages})).status_code == 200
    assert '{"name": "search", "arguments": {"days": 3}}' in prompt_text(source)
    assert '{"name": "search", "arguments": "{days"}' in prompt_text(source)
    assert "<|im_start|>tool\nsunny<|im_end|>" in prompt_text(source)


async def test_logprobs_are_those_of_sampled_tokens(http: httpx.AsyncClient, source: ScriptedSource) -> None:
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 0}
    (choice,) = (await http.post(URL, json=body)).json()["choices"]
    made, _ = source.ids(next(iter(source.submitted)))
    content = choice["logprobs"]["content"]
    assert [one["logprob"] for one in content] == [-0.25 * (1 + place % 4) for place in range(len(made))]
    assert [one["token"] for one in content] == [source.model.token_text(token) for token in made]
    assert all(one["top_logprobs"] == [] for one in content)


async def test_a_repeat_under_the_same_id_meets_the_same_rollouts(
    http: httpx.AsyncClient, source: ScriptedSource
) -> None:
    source.answers = ["first", "second"]
    body = {"messages": HELLO, "n": 2}
    headers = {"X-Request-ID": "turn-7", "X-Session-ID": "episode 1"}
    first = await http.post(URL, json=body, headers=headers)
    again = await http.post(URL, json=body, headers=headers)
    assert first.json()["choices"] == again.json()["choices"]
    assert first.headers["x-request-id"] == "turn-7"
    assert len(source.submitted) == 2
    other = await http.post(URL, json=body | {"max_tokens": 3}, headers=headers)
    assert other.status_code == 409
    assert other.headers["x-should-retry"] == "false"
    for changed in ({"X-Session-ID": "episode 2"}, {"X-Request-ID": "turn-8"}):
        assert (await http.post(URL, json=body, headers=headers | changed)).status_code == 200
    assert len(source.submitted) == 6
    assert len({rollout.episode_id for rollout in source.submitted.values()}) == 2


async def test_a_session_in_the_path_is_one_in_the_header(http: httpx.AsyncClient, source: ScriptedSource) -> None:
    await http.post(f"/sessions/episode-1{URL}", json={"messages": HELLO, "request_id": "one"})
    await http.post(URL, json={"messages": HELLO, "request_id": "one"}, headers={"X-Session-ID": "episode-1"})
    assert len(source.submitted) == 1
    assert (await http.get("/sessions/episode-1/v1/models")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_the_openai_client_reads_chats_and_calls(app: Starlette, source: ScriptedSource, stream: bool) -> None:
    source.answer = CALL
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app)) as over:
        client = openai.AsyncOpenAI(base_url="http://gateway/v1", api_key=SECRET, http_client=over, max_retries=0)
        asked: Any = {"model": "spell", "messages": HELLO, "tools": [SEARCH]}
        if stream:
            async with client.chat.completions.stream(**asked) as streamed:
                made = await streamed.get_final_completion()
        else:
            made = await client.chat.completions.create(**asked)
    message = made.choices[0].message
    assert message.content == "I look."
    assert message.tool_calls is not None
    assert json.loads(message.tool_calls[0].function.arguments) == {"days": 3}


async def test_each_chunk_is_flushed_to_people(http: httpx.AsyncClient, source: ScriptedSource) -> None:
    await http.post(URL, json={"messages": HELLO, "stream": True})
    assert [rollout.interactive for rollout in source.submitted.values()] == [True]
