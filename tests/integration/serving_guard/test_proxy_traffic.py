"""The proxy reports requests to its listener, which can delay them."""

import asyncio
import json
from collections.abc import Awaitable
from typing import Any

import pytest
from aiohttp import web

from ebbtide.serving_guard.proxy.proxy import Proxy
from ebbtide.serving_guard.settings import ProxySettings
from tests.integration.serving_guard.stand import CHAT, COMPLETIONS, Engine, begin, event, on_uvloop, standing
from tests.support.waiting import wait_until


def streaming(*events: Any, end: bytes = b"data: [DONE]\n\n") -> Any:
    async def handler(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = await begin(request)
        for one in events:
            await response.write(event(one))
        await response.write(end)
        return response

    return handler


@on_uvloop
async def test_a_streamed_chat_is_reported_from_arrival_to_its_end() -> None:
    async with standing() as stand:
        assert (await stand.chat())[0] == 200
        (arrived,) = stand.traffic.of("arrived")
        request, model, prompt_tokens, at, streamed = arrived
        assert model == "served"
        assert streamed
        assert 0 < prompt_tokens < 20
        assert stand.traffic.tokens == stand.engine.events  # neither who speaks, nor [DONE]
        times = [at, *[when for _, _, when in stand.traffic.of("produced")], stand.traffic.of("ended")[0][2]]
        assert times == sorted(times)
        assert {entry[1] for entry in stand.traffic.calls} == {request}
        assert stand.traffic.outcomes == [True]


@on_uvloop
async def test_the_first_token_is_reported_when_it_passes() -> None:
    async with standing() as stand:
        stand.engine.handler = stand.engine.endless
        async with stand.session.post(COMPLETIONS, json={"stream": True, "prompt": [1, 2, 3]}) as response:
            await response.content.readuntil(b"\n\n")
            await wait_until(lambda: stand.traffic.tokens >= 3)
            assert stand.traffic.of("arrived")[0][2] == 3
            assert not stand.traffic.outcomes


@on_uvloop
async def test_usage_corrects_what_events_said() -> None:
    choice = {"choices": [{"text": "several words"}]}
    usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 9}}
    async with standing() as stand:
        stand.engine.handler = streaming(choice, choice, usage)
        await stand.chat()
        assert stand.traffic.tokens == 9


@on_uvloop
async def test_an_answer_in_one_piece_counts_as_one_token() -> None:
    async with standing() as stand:
        async with stand.session.post(CHAT, json={"messages": []}) as response:
            assert response.status == 200
        assert stand.traffic.tokens == 1
        assert stand.traffic.of("arrived")[0][4] is False


@on_uvloop
async def test_an_answer_that_does_not_stream_though_asked_to_has_no_first_token() -> None:
    async def whole(request: web.Request) -> web.Response:
        return web.json_response({"data": [], "usage": {"prompt_tokens": 7}})

    async with standing() as stand:
        stand.engine.handler = whole
        assert (await stand.chat())[0] == 200
        assert stand.traffic.of("arrived")[0][4] is True
        assert (stand.traffic.tokens, stand.traffic.outcomes) == (0, [True])


@on_uvloop
async def test_prompts_are_estimated_as_the_engine_counts_them() -> None:
    text = "x" * 4000
    async with standing() as stand:
        usage = {"choices": [], "usage": {"prompt_tokens": 2000, "completion_tokens": 1}}
        stand.engine.handler = streaming(usage)
        for _ in range(2):
            await stand.chat(messages=[{"role": "user", "content": text}])
        first, second = (entry[2] for entry in stand.traffic.of("arrived"))
        assert 1000 <= first < 1020
        assert 1990 <= second < 2010


@on_uvloop
async def test_errors_of_the_engine_pass_and_end_badly() -> None:
    async def refusing(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "too long"}}, status=400)

    async with standing() as stand:
        stand.engine.handler = refusing
        status, body = await stand.chat()
        assert (status, json.loads(body)) == (400, {"error": {"message": "too long"}})
        stand.engine.handler = streaming({"choices": [{"delta": {"content": "a"}}]}, {"error": {"message": "died"}})
        assert (await stand.chat())[0] == 200
        assert stand.traffic.outcomes == [False, False]
        assert stand.traffic.tokens == 1


@on_uvloop
async def test_other_requests_than_inference_are_not_reported() -> None:
    async with standing() as stand:
        async with stand.session.get("/v1/models") as response:
            assert response.status == 200
        async with stand.session.post("/tokenize", json={"prompt": "a"}) as response:
            assert response.status == 200
        async with stand.session.get(CHAT) as response:
            assert response.status == 200
        assert stand.traffic.calls == []


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b'{"prompt": 3, "stream": "maybe"}', b'{"model": 7}'])
@on_uvloop
async def test_a_body_that_is_odd_passes_as_it_is(body: bytes) -> None:
    async def echo(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    async with standing() as stand:
        stand.engine.handler = echo
        async with stand.session.post(COMPLETIONS, data=body) as response:
            assert await response.read() == body
        assert stand.traffic.outcomes == [True]


@on_uvloop
async def test_a_request_waits_while_it_is_held_and_no_longer() -> None:
    go_on = asyncio.Event()

    async def hold(_: str) -> None:
        await go_on.wait()

    async with standing(max_hold_s=30.0) as stand:
        stand.traffic.hold = hold
        request = asyncio.create_task(stand.chat())
        await wait_until(lambda: stand.traffic.of("arrived"))
        assert stand.engine.asked == 0
        go_on.set()
        assert (await request)[0] == 200


@on_uvloop
async def test_a_hold_has_its_bound() -> None:
    cancelled: list[str] = []

    async def hold(request: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(request)

    async with standing(max_hold_s=0.05) as stand:
        stand.traffic.hold = hold
        assert (await stand.chat())[0] == 200
        await wait_until(lambda: cancelled == ["1"])


@on_uvloop
async def test_a_client_that_leaves_while_held_never_meets_the_engine() -> None:
    async with standing(max_hold_s=30.0) as stand:
        stand.traffic.hold = lambda _: asyncio.get_running_loop().create_future()
        request = asyncio.create_task(stand.chat())
        await wait_until(lambda: stand.traffic.of("arrived"))
        request.cancel()
        await wait_until(lambda: stand.traffic.outcomes == [False])
        assert stand.engine.asked == 0


class Broken:
    """A listener whose calls all fail."""

    def __init__(self, *, late: bool) -> None:
        self._late = late

    def arrived(self, request: str, model: str, prompt_tokens: int, now: float, streamed: bool) -> None:
        raise RuntimeError("arrived")

    def ready(self, request: str) -> Awaitable[None]:
        if not self._late:
            raise RuntimeError("ready")

        async def fail() -> None:
            raise RuntimeError("ready, later")

        return fail()

    def produced(self, request: str, tokens: int, now: float) -> None:
        raise RuntimeError("produced")

    def ended(self, request: str, ok: bool, now: float) -> None:
        raise RuntimeError("ended")


@pytest.mark.parametrize("late", [False, True])
@on_uvloop
async def test_a_listener_that_fails_costs_no_request(late: bool) -> None:
    engine = Engine()
    await engine.start()
    proxy = Proxy(ProxySettings(drain_s=0.2), engine.url, Broken(late=late), "127.0.0.1:0")
    await proxy.start()
    async with standing(f"http://{proxy.address}") as stand:
        for _ in range(3):
            status, body = await stand.chat()
            assert status == 200
            assert body.endswith(b"[DONE]\n\n")
        assert stand.counted("listener_failures") == 3 * (3 + engine.events)
    await proxy.stop()
    await engine.stop()
