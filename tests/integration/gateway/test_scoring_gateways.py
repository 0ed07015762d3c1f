"""Clients that have prompts scored, before real coordinators and workers, some of which die or cannot."""

import asyncio
from typing import Any

import openai
import pytest
from msgspec.structs import replace

from tests.fakes.scripted_engine import script_scores
from tests.integration.gateway.conftest import SCRIPT, GatewayStand
from tests.support.waiting import wait_until

PROMPT = list(range(5, 305))
#: So long does a worker read that is to die over it.
ENDLESS_S = 600


async def loglikelihood(client: openai.AsyncOpenAI, **headers: str) -> Any:
    """As lm-evaluation-harness asks for it."""
    answer = await client.completions.create(
        model="spell", prompt=PROMPT, max_tokens=1, temperature=0, logprobs=1, echo=True, extra_headers=headers
    )
    return answer.choices[0]


def expected(stand: GatewayStand) -> list[float]:
    """The logprobs of all tokens behind the first, as any engine's script gives them."""
    places = script_scores(SCRIPT, [*PROMPT, *stand.expected(PROMPT, 1)], 1)
    logprobs: list[float] = places["logprob"][:, 0].tolist()
    return logprobs


async def check_long_prompt(client: openai.AsyncOpenAI) -> None:
    """84,000 scores, which travel in several pieces."""
    prompt = [5 + place % 400 for place in range(4000)]
    further: dict[str, Any] = {"prompt_logprobs": 20, "return_token_ids": True}
    answer = await client.completions.create(model="spell", prompt=prompt, max_tokens=1, extra_body=further)
    choice: Any = answer.choices[0]
    places = script_scores(SCRIPT, [*prompt, *choice.token_ids], 20).tolist()
    assert choice.prompt_logprobs[0] is None
    assert [
        {token: (one["logprob"], one["rank"]) for token, one in place.items()} for place in choice.prompt_logprobs[1:]
    ] == [{str(token): (logprob, rank) for token, logprob, rank in place} for place in places[:-1]]


async def test_a_prompt_is_scored_again_after_its_worker_was_killed(stand: GatewayStand) -> None:
    first, second = await asyncio.gather(stand.gateway("g1"), stand.gateway("g2"))
    with pytest.raises(openai.InternalServerError, match="no attached worker scores prompts") as refused:
        await loglikelihood(first)
    assert refused.value.status_code == 503

    await stand.cluster.worker("slow", script=replace(SCRIPT, scores=True, first_token_s=ENDLESS_S))
    asked = asyncio.create_task(loglikelihood(first, **{"X-Request-ID": "one"}))

    async def reads() -> bool:
        workers = {worker.worker_id: worker for worker in await stand.client.workers()}
        return bool(workers["slow"].running)

    await wait_until(reads, what="the prompt is with the worker that scores")
    await stand.cluster.worker("quick", script=replace(SCRIPT, scores=True))
    stand.cluster.kill("slow")
    found = await asked
    assert found.logprobs.token_logprobs == [None, *expected(stand)]
    undisturbed = await loglikelihood(second)
    assert undisturbed.logprobs == found.logprobs
    await check_long_prompt(second)
    stand.cluster.kill("quick")
    assert (await loglikelihood(second, **{"X-Request-ID": "one"})).logprobs == found.logprobs
