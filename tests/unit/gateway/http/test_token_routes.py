"""Routes that take token ids: /inference/v1/generate, SGLang's /generate, and /tokenize."""

import json
import threading
from itertools import pairwise
from unittest.mock import Mock

import httpx
import numpy as np
import pytest

from ebbtide.gateway.access import RequestLimits
from ebbtide.gateway.decode import ChoiceDelta, ChoiceFinish
from ebbtide.gateway.dialects.dialect import AnswerContext
from ebbtide.gateway.dialects.sglang import SglangDialect
from ebbtide.gateway.model import ServedModel
from ebbtide.types.tokens import TOKEN
from tests.fakes.scripted_rollouts import ScriptedSource, scripted_run
from tests.unit.gateway.http.test_completions import events

URL = "/inference/v1/generate"


async def test_ids_go_in_and_come_out_with_logprobs_and_versions(
    http: httpx.AsyncClient, source: ScriptedSource
) -> None:
    sampling = {"max_tokens": 60, "logprobs": 1, "skip_special_tokens": False, "stop_token_ids": [], "n": 1}
    sampling |= {"routed_experts_prompt_start": 5}  # verifiers' client asks so behind a first turn
    body = {"model": "spell-1", "token_ids": [1, 2, 3], "sampling_params": sampling, "return_token_ids": True}
    answer = (await http.post(URL, json=body)).json()
    made, _ = source.ids(next(iter(source.submitted)))
    (choice,) = answer["choices"]
    assert answer["prompt_token_ids"] == [1, 2, 3]
    assert choice["token_ids"] == made
    assert [one["token_id"] for one in choice["logprobs"]["content"]] == made
    assert [one["token"] for one in choice["logprobs"]["content"]] == [f"token_id:{one}" for one in made]
    assert choice["weight_versions"] == [{"version": "3", "start": 0, "end": len(made)}]
    assert "text" not in choice
    assert answer["request_id"]
    assert answer["usage"]["prompt_tokens"] == 3


async def test_a_stream_of_ids_tells_its_versions_at_the_end(http: httpx.AsyncClient, source: ScriptedSource) -> None:
    body = {"token_ids": [5], "sampling_params": {}, "stream": True, "output_mode": "text", "return_token_ids": True}
    chunks = events(await http.post(URL, json=body))
    made, _ = source.ids(next(iter(source.submitted)))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [token for choice in choices for token in choice["token_ids"]] == made
    assert "".join(choice["text"] for choice in choices) == "Hello world"
    assert chunks[0]["prompt_token_ids"] == [5]
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    assert choices[-1]["weight_versions"] == [{"version": "3", "start": 0, "end": len(made)}]
    assert not any("weight_versions" in choice for choice in choices[:-1])


async def test_without_a_length_the_context_is_the_bound(http: httpx.AsyncClient, source: ScriptedSource) -> None:
    await http.post(URL, json={"token_ids": [1] * 12, "sampling_params": {}})
    assert next(iter(source.submitted.values())).sampling.max_tokens == source.model.context - 12


async def test_sglang_reads_its_pairs_of_logprob_and_id(http: httpx.AsyncClient, source: ScriptedSource) -> None:
    body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 40}, "return_logprob": True, "rid": "r1"}
    answer = (await http.post("/generate", json=body)).json()
    made, _ = source.ids(next(iter(source.submitted)))
    meta = answer["meta_info"]
    assert answer["text"] == "Hello world"
    assert answer["output_ids"] == made
    assert [pair[1] for pair in meta["output_token_logprobs"]] == made
    assert (meta["id"], meta["weight_version"], meta["prompt_tokens"]) == ("r1", "3", 2)
    assert (meta["weight_version_start"], meta["weight_version_end"]) == (3, 3)
    assert meta["finish_reason"] == {"type": "stop"}


async def test_sglang_streams_all_of_the_text_each_time(http: httpx.AsyncClient) -> None:
    chunks = events(await http.post("/generate", json={"text": "a", "stream": True}))
    texts = [chunk["text"] for chunk in chunks]
    assert texts[-1] == "Hello world"
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))


async def test_sglangs_events_together_grow_with_the_answer_and_not_with_its_square() -> None:
    asked = SglangDialect().read({"input_ids": [1], "stream": True, "return_logprob": True})
    played = Mock(prompts=[[1]], prompt_of=lambda _index: [1])
    answer = asked.answer(AnswerContext(request_id="r", created=0, played=played, token_text=str, decode=str))
    token, length = np.array([(7, -0.5, 3)], dtype=TOKEN), 5_000
    deltas = [ChoiceDelta(index=0, tokens=token, text="x") for _ in range(length)]
    sent = [answer.events(delta) for delta in deltas]
    last = answer.events(ChoiceDelta(index=0, tokens=token, text="y", finish=ChoiceFinish(reason="stop")))
    assert all(sent[:64]), "the first ones come as they are made"
    assert sum(map(len, sent)) < 40 * len(last)
    found = json.loads(last.removeprefix(b"data: "))
    assert found["text"] == "x" * length + "y"
    assert len(found["output_ids"]) == len(found["meta_info"]["output_token_logprobs"]) == length + 1


async def test_sglang_answers_a_list_for_a_list(http: httpx.AsyncClient, source: ScriptedSource) -> None:
    source.answers = ["one", "two"]
    answer = (await http.post("/generate", json={"input_ids": [[1], [2, 3]]})).json()
    assert [one["text"] for one in answer] == ["one", "two"]
    assert [one["meta_info"]["prompt_tokens"] for one in answer] == [1, 2]


async def test_a_text_and_a_chat_are_tokenized_as_they_would_be_sent(
    http: httpx.AsyncClient, source: ScriptedSource
) -> None:
    asked = {"prompt": "the dog", "return_token_strs": True}
    answer = (await http.post("/tokenize", json=asked)).json()
    assert answer["tokens"] == source.model.encode("the dog", special=True)
    assert "".join(answer["token_strs"]) == "the dog"
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 512)
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    tokens = (await http.post("/tokenize", json=chat)).json()["tokens"]
    whole = (await http.post("/v1/chat/completions", json=chat | {"return_token_ids": True})).json()
    assert tokens == whole["prompt_token_ids"]


async def test_a_text_is_tokenized_up_to_the_length_of_a_prompt_and_away_from_the_event_loop(
    http: httpx.AsyncClient, source: ScriptedSource, limits: RequestLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set[threading.Thread]()

    def token_text(_model: ServedModel, _token: int) -> str:
        threads.add(threading.current_thread())
        return "?"

    monkeypatch.setattr(ServedModel, "token_text", token_text)
    asked = {"prompt": "the dog", "return_token_strs": True}
    assert (await http.post("/tokenize", json=asked)).status_code == 200
    assert threads
    assert threading.main_thread() not in threads
    answer = await http.post("/tokenize", json=asked | {"prompt": "the dog " * limits.prompt_tokens})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"


async def test_a_version_that_is_not_there_is_a_conflict_to_be_retried(
    http: httpx.AsyncClient, source: ScriptedSource
) -> None:
    for wish in ({"min_version": 4}, {"exact_version": 2}, {"exact_version": 9}):
        answer = await http.post("/generate", json={"text": "a", "weight_version": wish})
        assert answer.status_code == 409
        assert answer.headers["retry-after"] == "1"
        assert answer.headers["x-should-retry"] == "true"
    source.newer = scripted_run(version=4)
    assert (await http.post("/generate", json={"text": "a", "weight_version": {"min_version": 4}})).status_code == 200
    await http.post("/generate", json={"text": "a", "weight_version": {"exact_version": 4}})
    bounds = [(rollout.min_version, rollout.max_version) for rollout in source.submitted.values()]
    assert bounds == [(4, 0), (4, 4)]


async def test_a_run_without_a_version_asks_to_be_tried_later(http: httpx.AsyncClient, source: ScriptedSource) -> None:
    source.run = scripted_run(version=0)
    answer = await http.post("/generate", json={"text": "a"})
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
