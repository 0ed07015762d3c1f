"""/v1/completions scores prompts, and answers as the clients of OpenAI and of vLLM read it; other routes name it."""

from typing import Any

import httpx
import pytest

from ebbtide.errors import NotReady
from tests.fakes.scripted_rollouts import ScriptedSource

#: As lm-evaluation-harness asks for the loglikelihood of a text.
HARNESS: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234}


def own(source: ScriptedSource) -> list[float]:
    """The stored logprobs of the only prompt's tokens, but the first, and of the sampled one."""
    (rollout,) = source.submitted
    found: list[float] = source.scores(rollout)["logprob"][:, 0].tolist()
    return found


def as_vllm(source: ScriptedSource, rollout: str) -> list[dict[str, Any] | None]:
    """The stored scores of a prompt, as vLLM's routes name them."""
    places = source.scores(rollout)[:-1].tolist()
    text = source.model.token_text
    named = [
        {str(token): {"logprob": logprob, "rank": rank, "decoded_token": text(token)} for token, logprob, rank in place}
        for place in places
    ]
    return [None, *named]


async def test_an_echoed_prompt_comes_with_its_logprobs_as_openai_had_them(
    http: httpx.AsyncClient, source: ScriptedSource
) -> None:
    ids = source.model.encode("the quick dog", special=False)
    answer = (await http.post("/v1/completions", json=HARNESS | {"prompt": ids})).json()
    (choice,) = answer["choices"]
    (rollout,) = source.submitted
    sampled = source.ids(rollout)[0]
    logprobs, names = choice["logprobs"], [source.model.token_text(token) for token in [*ids, *sampled]]
    assert logprobs["tokens"] == names
    assert logprobs["token_logprobs"] == [None, *own(source)]
    assert logprobs["top_logprobs"][0] is None
    places = source.scores(rollout).tolist()
    assert logprobs["top_logprobs"][1:] == [
        {source.model.token_text(token): logprob for token, logprob, _ in place} for place in places
    ]
    assert logprobs["text_offset"] == [sum(map(len, names[:at])) for at in range(len(names))]
    assert choice["text"] == "the quick dog" + source.model.token_text(sampled[0])
    assert answer["usage"]["completion_tokens"] == 1
    assert (answer["weight_version_start"], answer["weight_version_end"]) == (3, 3)


async def test_a_prompt_is_echoed_alone_where_no_token_is_asked_for(
    http: httpx.AsyncClient, source: ScriptedSource
) -> None:
    prompt = "the quick dog"
    answer = (await http.post("/v1/completions", json=HARNESS | {"prompt": prompt, "max_tokens": 0})).json()
    (choice,) = answer["choices"]
    assert choice["text"] == prompt
    assert choice["logprobs"]["token_logprobs"] == [None, *own(source)[:-1]]
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["weight_version_end"] == 3


async def test_prompts_of_one_request_are_scored_each_by_itself(
    http: httpx.AsyncClient, source: ScriptedSource
) -> None:
    prompts = [[5, 6, 7], [8, 9], [10]]
    answer = (await http.post("/v1/completions", json=HARNESS | {"prompt": prompts})).json()
    for rollout, prompt, choice in zip(source.submitted, prompts, answer["choices"], strict=True):
        assert len(choice["logprobs"]["tokens"]) == len(prompt) + 1
        assert choice["prompt_logprobs"] == as_vllm(source, rollout)


async def test_prompt_logprobs_are_shaped_as_vllm_does(http: httpx.AsyncClient, source: ScriptedSource) -> None:
    body = {"prompt": "the dog", "max_tokens": 1, "prompt_logprobs": 3}
    (choice,) = (await http.post("/v1/completions", json=body)).json()["choices"]
    (rollout,) = source.submitted
    assert choice["prompt_logprobs"] == as_vllm(source, rollout)
    assert choice["logprobs"] is None
    assert len(choice["prompt_logprobs"][1]) in (3, 4)  # the token may be one of the three


CHAT = [{"role": "user", "content": "x"}]
TOKENS = {"token_ids": [5, 6], "sampling_params": {"prompt_logprobs": 0, "max_tokens": 1}}
SCORED = {"prompt": [5, 6], "max_tokens": 1, "prompt_logprobs": 0}
SGLANG = {"input_ids": [5, 6], "return_logprob": True}


@pytest.mark.parametrize(
    ("route", "body", "field"),
    [
        ("/v1/completions", SCORED | {"max_tokens": 2}, "max_tokens"),
        ("/v1/completions", {"prompt": [5], "prompt_logprobs": 0}, "max_tokens"),
        ("/v1/completions", SCORED | {"n": 2}, "n"),
        ("/v1/completions", SCORED | {"stream": True}, "stream"),
        ("/v1/completions", SCORED | {"session_id": "s"}, "X-Session-ID"),
        ("/v1/completions", SCORED | {"prompt_logprobs": -1}, "prompt_logprobs"),
        ("/v1/completions", SCORED | {"prompt_logprobs": 21}, "prompt_logprobs"),
        ("/v1/completions", SCORED | {"logprobs": 2}, "logprobs"),
        ("/v1/completions", HARNESS | {"prompt": [5], "logprobs": None}, "echo"),
        ("/v1/completions", HARNESS | {"prompt": [5], "prompt_logprobs": 2}, "prompt_logprobs"),
        ("/v1/completions", HARNESS | {"prompt": [5], "max_tokens": 2}, "max_tokens"),
        ("/v1/completions", HARNESS | {"prompt": [5], "temperature": 0.1}, "seed"),
        ("/v1/completions", {"prompt": [5], "max_tokens": 0}, "max_tokens"),
        ("/v1/completions", HARNESS | {"prompt": [[5] * 190] * 40, "logprobs": 20}, "prompt_logprobs"),
        ("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
    ],
)
async def test_what_cannot_be_scored_exactly_is_refused_by_the_fields_name(
    http: httpx.AsyncClient, source: ScriptedSource, route: str, body: dict[str, Any], field: str
) -> None:
    answer = await http.post(route, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"].startswith(f"{field}: "), answer.text
    assert not source.submitted


@pytest.mark.parametrize(
    ("route", "body", "field"),
    [
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 1, "prompt_logprobs": 0}, "prompt_logprobs"),
        ("/v1/responses", {"input": "x", "prompt_logprobs": 0}, "prompt_logprobs"),
        ("/inference/v1/generate", TOKENS, "sampling_params.prompt_logprobs"),
        ("/generate", SGLANG | {"logprob_start_len": 0}, "logprob_start_len"),
    ],
)
async def test_another_route_names_the_one_that_scores_prompts(
    http: httpx.AsyncClient, source: ScriptedSource, route: str, body: dict[str, Any], field: str
) -> None:
    answer = await http.post(route, json=body)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.startswith(f"{field}: ")
    assert "/v1/completions" in message
    assert not source.submitted


async def test_sglangs_clients_may_say_that_they_want_no_scores(http: httpx.AsyncClient) -> None:
    body = SGLANG | {"logprob_start_len": -1, "top_logprobs_num": 0}
    assert (await http.post("/generate", json=body)).status_code == 200
    answer = await http.post("/generate", json=body | {"top_logprobs_num": 1})
    assert answer.json()["error"]["param"] == "top_logprobs_num"


async def test_a_fleet_that_does_not_score_gives_an_error_that_can_be_tried_again(
    http: httpx.AsyncClient, source: ScriptedSource
) -> None:
    source.scores_prompts = False  # it generates a token, as for any request
    answer = await http.post("/v1/completions", json=SCORED)
    assert answer.status_code == 503
    assert "the prompt was not scored" in answer.json()["error"]["message"]
    source.refusal = NotReady("no attached worker scores prompts; start workers")
    answer = await http.post("/v1/completions", json=SCORED)
    assert answer.status_code == 503
    assert "no attached worker scores prompts" in answer.json()["error"]["message"]


async def test_a_request_for_other_scores_is_not_taken_for_a_repeat(
    http: httpx.AsyncClient, source: ScriptedSource
) -> None:
    named = SCORED | {"request_id": "one"}
    first, again = [(await http.post("/v1/completions", json=named)).json()["choices"] for _ in range(2)]
    assert first == again
    assert len(source.submitted) == 1
    assert (await http.post("/v1/completions", json=named | {"prompt_logprobs": 1})).status_code == 409
