"""/v1/completions: texts and token ids in, texts and token ids out, whole and in events."""

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import httpx2
import msgspec
import openai
import pytest
from starlette.applications import Starlette

from tests.fakes.scripted_rollouts import ScriptedSource, scripted_run
from tests.support.waiting import wait_until
from tests.unit.gateway.http.conftest import SECRET

URL = "/v1/completions"


def events(response: httpx.Response) -> list[dict]:  # type: ignore[type-arg]
    """The chunks of a stream, which has to end as OpenAI's do."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [msgspec.json.decode(line) for line in lines]


async def test_a_text_is_completed_as_openai_answers_it(http: httpx.AsyncClient, source: ScriptedSource) -> None:
    answer = (await http.post(URL, json={"model": "spell-1", "prompt": "the dog", "max_tokens": 50})).json()
    assert answer["object"] == "text_completion"
    assert answer["model"] == "spell-1"
    assert answer["choices"][0]["text"] == "Hello world"
    assert answer["choices"][0]["finish_reason"] == "stop"
    prompt, (rollout,) = source.model.encode("the dog", special=True), source.submitted
    made = len(source.ids(rollout)[0])
    assert answer["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": made,
        "total_tokens": len(prompt) + made,
    }
    assert (answer["weight_version_start"], answer["weight_version_end"]) == (3, 3)


async def test_token_ids_come_back_as_the_engine_made_them(http: httpx.AsyncClient, source: ScriptedSource) -> None:
    ids = source.model.encode("the quick", special=False)
    body = {"model": "spell-1", "prompt": ids, "return_token_ids": True, "logprobs": 0, "max_tokens": 40}
    (choice,) = (await http.post(URL, json=body)).json()["choices"]
    (rollout,) = source.submitted
    made, _ = source.ids(rollout)
    assert choice["prompt_token_ids"] == ids
    assert choice["token_ids"] == made
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == [-0.25 * (1 + place % 4) for place in range(len(made))]
    sampled = zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
    assert logprobs["top_logprobs"] == [{token: logprob} for token, logprob in sampled]
    (other,) = (await http.post(URL, json=body | {"logprobs": 1})).json()["choices"]
    assert other["logprobs"]["top_logprobs"] is None, "the likeliest token is not known"
    assert choice["logprobs"]["tokens"] == [source.model.token_text(token) for token in made]
    assert choice["weight_versions"] == [{"version": "3", "start": 0, "end": len(made)}]


async def test_tokens_can_be_named_by_their_ids(http: httpx.AsyncClient, source: ScriptedSource) -> None:
    body = {"prompt": "a", "logprobs": 1, "return_tokens_as_token_ids": True}
    (choice,) = (await http.post(URL, json=body)).json()["choices"]
    made, _ = source.ids(next(iter(source.submitted)))
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in made]


async def test_a_stream_adds_up_to_the_whole_answer(http: httpx.AsyncClient, source: ScriptedSource) -> None:
    source.answer = "He said: weather in Zürich 🎉, and the dog sleeps on."
    body = {"prompt": "x", "max_tokens": 100, "logprobs": 0, "return_token_ids": True, "request_id": "one"}
    (whole,) = (await http.post(URL, json=body)).json()["choices"]
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}, "request_id": "two"}
    *chunks, last = events(await http.post(URL, json=streamed))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == whole["text"] == source.answer
    assert [token for choice in choices for token in choice["token_ids"]] == whole["token_ids"]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [one for choice in choices for one in choice["logprobs"][name]] == whole["logprobs"][name]
    assert [choice["finish_reason"] for choice in choices[-2:]] == [None, "stop"]
    assert "prompt_token_ids" in choices[0]
    assert not any("prompt_token_ids" in choice for choice in choices[1:])
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(whole["token_ids"])
    assert chunks[-1]["weight_version_end"] == 3


async def test_each_prompt_has_its_own_completions_in_order(http: httpx.AsyncClient, source: ScriptedSource) -> None:
    source.answers = ["one", "two", "three", "four"]
    answer = (await http.post(URL, json={"prompt": ["a", "b b"], "n": 2, "return_token_ids": True})).json()
    assert [choice["text"] for choice in answer["choices"]] == ["one", "two", "three", "four"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    prompts = [choice["prompt_token_ids"] for choice in answer["choices"]]
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3]
    chunks = events(await http.post(URL, json={"prompt": ["a", "b b"], "n": 2, "stream": True}))
    assert {chunk["choices"][0]["index"] for chunk in chunks} == {0, 1, 2, 3}


@pytest.mark.parametrize("session", [{}, {"X-Session-ID": "s"}])
async def test_a_repeat_is_answered_though_its_version_is_gone(
    http: httpx.AsyncClient, source: ScriptedSource, session: dict[str, str]
) -> None:
    body, headers = {"prompt": "x", "weight_version": {"exact_version": 3}}, {"X-Request-ID": "same", **session}
    first = await http.post(URL, json=body, headers=headers)
    source.run = scripted_run(version=4)
    again = await http.post(URL, json=body, headers=headers)
    assert again.status_code == 200
    assert again.json()["choices"] == first.json()["choices"]
    for other in ({"X-Request-ID": "another", **session}, session):
        assert (await http.post(URL, json=body, headers=other)).status_code == 409


CHANGES: list[dict[str, Any]] = [{"stop": "wor"}, {"n": 2}, {"skip_special_tokens": False}, {"min_tokens": 1}]


@pytest.mark.parametrize("session", [{}, {"X-Session-ID": "s"}])
@pytest.mark.parametrize("change", CHANGES)
async def test_another_request_under_an_id_is_refused_whatever_makes_its_answer_differ(
    http: httpx.AsyncClient, change: dict[str, Any], session: dict[str, str]
) -> None:
    headers = {"X-Request-ID": "same", **session}
    assert (await http.post(URL, json={"prompt": "x"}, headers=headers)).status_code == 200
    refused = await http.post(URL, json={"prompt": "x"} | change, headers=headers)
    assert refused.status_code == 409
    assert refused.json()["error"]["message"].startswith("X-Request-ID: another request")


async def test_a_stop_string_ends_the_text_and_the_rollout(http: httpx.AsyncClient, source: ScriptedSource) -> None:
    source.answer = "The quick brown fox jumps over the lazy dog"
    body = {"prompt": "x", "stop": ["fox j", "lazy"], "max_tokens": 60, "return_token_ids": True}
    (choice,) = (await http.post(URL, json=body)).json()["choices"]
    (rollout,) = source.submitted
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("The quick brown ", "stop", "fox j")
    made = source.ids(rollout)[0]
    assert choice["token_ids"] == made[: len(choice["token_ids"])] != made
    assert "fox j" in source.model.decode(choice["token_ids"], skip_special=False)
    await wait_until(lambda: source.cancelled == [rollout])
    assert source.submitted[rollout].sampling.stop == ()
    kept = (await http.post(URL, json=body | {"include_stop_str_in_output": True})).json()["choices"][0]
    assert kept["text"] == "The quick brown fox j"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_does_not_wait_until_its_rollout_is_cancelled(
    http: httpx.AsyncClient, source: ScriptedSource, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    gate, ended, cancel = asyncio.Event(), asyncio.Event(), source.cancel_rollouts

    async def slowly(rollout_ids: Sequence[str]) -> None:
        await gate.wait()
        await cancel(rollout_ids)
        ended.set()

    monkeypatch.setattr(source, "cancel_rollouts", slowly)
    source.answer = "The quick brown fox jumps over the lazy dog"
    body = {"prompt": "x", "stop": ["fox j"], "max_tokens": 60, "stream": stream}
    async with asyncio.timeout(60):
        answer = await http.post(URL, json=body)
    assert "brown" in answer.text
    assert source.cancelled == []
    gate.set()
    await ended.wait()
    assert source.cancelled == list(source.submitted)


async def test_a_stop_token_is_answered_and_not_shown(http: httpx.AsyncClient, source: ScriptedSource) -> None:
    ids = source.model.encode("Hello world", special=False)
    body = {"prompt": "x", "stop_token_ids": [ids[-1]], "return_token_ids": True}
    (choice,) = (await http.post(URL, json=body)).json()["choices"]
    assert choice["stop_reason"] == choice["token_ids"][-1] == ids[-1]
    assert choice["text"] == source.model.decode(ids[:-1], skip_special=False)
    kept = (await http.post(URL, json=body | {"include_stop_str_in_output": True})).json()["choices"][0]
    assert kept["text"] == "Hello world"


async def test_a_length_ends_a_completion(http: httpx.AsyncClient) -> None:
    (choice,) = (await http.post(URL, json={"prompt": "x", "max_tokens": 2})).json()["choices"]
    assert choice["finish_reason"] == "length"


async def test_sampling_reaches_the_rollout_as_asked(http: httpx.AsyncClient, source: ScriptedSource) -> None:
    body = {"prompt": "x", "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_tokens": 1, "max_tokens": 9}
    neutral = {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "best_of": 1, "user": "me"}
    further = {"repetition_penalty": 1.1, "ignore_eos": True, "priority": -4, "seed": None}
    assert (await http.post(URL, json=body | neutral | further)).status_code == 200
    (rollout,) = source.submitted.values()
    sampling = rollout.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.5, 0.9, 0, 9)
    assert (sampling.min_tokens, sampling.repetition_penalty, sampling.ignore_eos) == (1, 1.1, True)
    assert rollout.priority == -4
    assert not rollout.interactive


@pytest.mark.parametrize(
    ("asked", "headers", "without"),
    [({}, {}, True), ({"logprobs": 1}, {}, False), ({}, {"X-Session-ID": "s"}, False)],
)
async def test_logprobs_are_computed_where_the_answer_or_a_session_has_them(
    http: httpx.AsyncClient, source: ScriptedSource, asked: dict[str, Any], headers: dict[str, str], without: bool
) -> None:
    body = {"prompt": "x", "max_tokens": 2}
    assert (await http.post(URL, json=body | asked, headers=headers)).status_code == 200
    (rollout,) = source.submitted.values()
    assert rollout.sampling.without_logprobs is without


@pytest.mark.parametrize("stream", [False, True])
async def test_the_openai_client_reads_completions(app: Starlette, stream: bool) -> None:
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app)) as over:
        client = openai.AsyncOpenAI(base_url="http://gateway/v1", api_key=SECRET, http_client=over, max_retries=0)
        if not stream:
            made = await client.completions.create(model="spell", prompt="the dog", max_tokens=30)
            assert made.choices[0].text == "Hello world"
            return
        texts = [
            chunk.choices[0].text
            async for chunk in await client.completions.create(
                model="spell", prompt="the dog", max_tokens=30, stream=True
            )
        ]
        assert "".join(texts) == "Hello world"
