"""Clients of gateways before real coordinators and workers, some of which die."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from ebbtide.auth.roles import Role
from ebbtide.cli.credentials import signing_keys
from ebbtide.types.session import KeyLimits
from tests.chaos.cluster import TOKEN
from tests.fakes.model_texts import byte_level_tokenizer
from tests.integration.gateway.conftest import GatewayStand
from tests.integration.gateway.test_gateway_sessions import trajectories
from tests.support.waiting import wait_until

PROMPT = [5, 6, 7, 8]


async def streamed(
    client: openai.AsyncOpenAI, count: int, seen: asyncio.Event, **headers: str
) -> tuple[list[int], str]:
    """The ids and the text of a stream. `seen` is set with its first chunk."""
    ids, text = list[int](), ""
    further: dict[str, Any] = {"return_token_ids": True}
    chunks = await client.completions.create(
        model="spell", prompt=PROMPT, max_tokens=count, stream=True, extra_body=further, extra_headers=headers
    )
    async for chunk in chunks:
        choice: Any = chunk.choices[0]
        ids += choice.token_ids
        text += choice.text
        seen.set()
    return ids, text


async def busy_worker(stand: GatewayStand) -> str:
    """The worker that generates."""

    async def found() -> str:
        workers = await stand.client.workers()
        return next((worker.worker_id for worker in workers if worker.running), "")

    return await wait_until(found)


async def test_a_killed_worker_costs_the_client_a_pause(stand: GatewayStand) -> None:
    client = await stand.gateway("g1")
    (model,) = (await client.models.list()).data
    assert model.id == "spell-1"
    seen = asyncio.Event()
    reading = asyncio.create_task(streamed(client, 150, seen))
    await seen.wait()
    stand.cluster.kill(await busy_worker(stand))
    ids, text = await reading
    assert ids == stand.expected(PROMPT, 150)
    assert text == byte_level_tokenizer().decode(ids, skip_special_tokens=True)


async def test_another_gateway_goes_on_where_one_was_killed(stand: GatewayStand) -> None:
    first, second = await asyncio.gather(stand.gateway("g1"), stand.gateway("g2"))
    seen = asyncio.Event()
    reading = asyncio.create_task(streamed(first, 100, seen, **{"X-Request-ID": "turn-1"}))
    await seen.wait()
    stand.cluster.kill("g1")
    broken = (await asyncio.gather(reading, return_exceptions=True))[0]
    assert isinstance(broken, openai.APIError | httpx.HTTPError)
    ids, _ = await streamed(second, 100, asyncio.Event(), **{"X-Request-ID": "turn-1"})
    assert ids == stand.expected(PROMPT, 100)
    run = await stand.client.run(stand.run_id)
    assert run.counters["requests_submitted"] == 1
    assert run.counters.get("submitted", 0) == 0


async def test_a_gateway_that_is_asked_to_end_finishes_what_it_serves(stand: GatewayStand) -> None:
    client = await stand.gateway("g1")
    process = stand.cluster.process["g1"]
    seen = asyncio.Event()
    reading = asyncio.create_task(streamed(client, 100, seen))
    await seen.wait()
    os.kill(process.pid, signal.SIGTERM)
    ids, _ = await reading
    assert ids == stand.expected(PROMPT, 100)
    await wait_until(lambda: not process.running())
    assert process.returncode == 0


async def test_a_client_that_leaves_ends_what_nobody_can_come_back_for(stand: GatewayStand) -> None:
    await stand.gateway("g1")
    url = f"http://{stand.cluster.process['g1'].address}/v1/completions"
    body = {"prompt": PROMPT, "max_tokens": 3000, "stream": True}
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient() as client, client.stream("POST", url, json=body, headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["x-request-id"]
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                break

    async def idle() -> bool:
        return not any(worker.running for worker in await stand.client.workers())

    await wait_until(idle, what="the rollout is cancelled")


async def test_what_only_the_coordinator_can_refuse_names_the_clients_field(stand: GatewayStand) -> None:
    client = await stand.gateway("g1")
    with pytest.raises(openai.BadRequestError, match="prompt: token id 450 is beyond the engines' vocabulary"):
        await client.completions.create(model="spell", prompt=[450])


async def test_a_keys_budget_holds_exactly_over_two_gateways_of_which_one_dies(
    stand: GatewayStand, tmp_path: Path
) -> None:
    signing_keys.make(tmp_path / "keys")
    limits = KeyLimits(tokens=200)
    key = signing_keys.issue(tmp_path / "keys", Role.AGENT, run_id=stand.run_id, ttl_s=600, name="a", limits=limits)
    trusted = str(tmp_path / "keys" / "tokens.pub")
    made = [await stand.gateway(name, door_token_keys=trusted) for name in ("g1", "g2")]
    clients = [client.with_options(api_key=key) for client in made]

    async def ask(number: int) -> int:
        try:
            answer = await clients[number % 2].completions.create(model="spell", prompt=PROMPT, max_tokens=16)
        except openai.RateLimitError:
            return 0
        assert answer.usage is not None
        return answer.usage.total_tokens

    spent = sum(await asyncio.gather(*map(ask, range(16))))
    assert spent == 200, "ten requests of 4 + 16 tokens"
    stand.cluster.kill("g1")
    with pytest.raises(openai.RateLimitError) as refused:
        await clients[1].completions.create(model="spell", prompt=PROMPT, max_tokens=1)
    assert refused.value.code == "insufficient_quota"
    (usage,) = await stand.client.key_usage(stand.run_id)
    assert (usage.owner, usage.requests, usage.tokens, usage.tokens_reserved) == ("name.agent.a", 10, 200, 0)


async def test_a_run_is_a_model_once_its_submit_has_returned(stand: GatewayStand) -> None:
    client = await stand.gateway("g1")
    spec = (await stand.client.run(stand.run_id)).spec
    for number in range(4):
        run = await stand.client.submit(msgspec.structs.replace(spec, name=f"new-{number}"), f"new-{number}")
        models = [model.id async for model in await client.models.list()]
        assert {stand.run_id, run.run_id} <= set(models)


async def test_an_agents_session_is_rewarded_by_its_owner_alone_and_trained_as_it_was_sampled(
    stand: GatewayStand, tmp_path: Path
) -> None:
    signing_keys.make(tmp_path / "keys")
    await stand.gateway("g1", door_token_keys=str(tmp_path / "keys" / "tokens.pub"))

    def key(role: Role, **more: Any) -> str:
        issued: dict[str, Any] = {"run_id": stand.run_id, "ttl_s": 600, "name": "team", **more}
        return signing_keys.issue(tmp_path / "keys", role, **issued)

    url = f"http://{stand.cluster.process['g1'].address}"
    owner = {"authorization": f"Bearer {key(Role.USER)}"}
    agents_key = key(Role.AGENT, session_id="episode 1")
    ways: list[dict[str, Any]] = [{"temperature": 0.5}, {"top_p": 0.75}, {"extra_body": {"top_k": 7, "min_p": 0.125}}]
    async with (
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=agents_key, max_retries=0) as agent,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        for way in ways:
            await agent.chat.completions.create(
                model="spell", messages=[{"role": "user", "content": "Hey"}], max_tokens=4, **way
            )
        path = "/v1/sessions/episode%201/reward"
        hacked = await http.post(path, json={"reward": 1.0}, headers={"authorization": f"Bearer {agents_key}"})
        other = await http.get("/v1/sessions/episode%202", headers={"authorization": f"Bearer {agents_key}"})
        assert (hacked.status_code, other.status_code) == (403, 403)
        assert (await http.post(path, json={"reward": 1.0}, headers=owner)).json()["state"] == "completed"
    found = [response.sampling for one in await trajectories(stand, len(ways)) for response in one.responses]
    assert [(one.temperature, one.top_p, one.top_k, one.min_p) for one in found] == [
        (0.5, 1.0, 0, 0.0), (1.0, 0.75, 0, 0.0), (1.0, 1.0, 7, 0.125),
    ]  # fmt: skip
