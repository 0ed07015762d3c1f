"""Clients that leave, streams that wait, and answers that fail midway."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest
from starlette.applications import Starlette

from ebbtide.errors import Internal, NoCapacity, Unavailable
from ebbtide.gateway.access import RequestLimits
from ebbtide.gateway.http.app import make_app
from ebbtide.gateway.http.route import AppState, HttpReply
from ebbtide.types.rollout import FinishReason
from ebbtide.types.run import TrainerSpec
from tests.fakes.asgi_call import AsgiCall
from tests.fakes.scripted_rollouts import ScriptedSource
from tests.support.waiting import wait_until
from tests.unit.gateway.http.conftest import HEADERS

URL = "/v1/completions"
BODY = {"prompt": "x", "max_tokens": 30}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_cannot_come_back_ends_its_rollouts(
    app: Starlette, source: ScriptedSource, state: AppState, stream: bool
) -> None:
    source.gate.clear()
    call = AsgiCall(app, URL, BODY | {"stream": stream, "n": 2}, HEADERS)
    await source.first.wait()
    call.leave()
    await call.task
    assert sorted(source.cancelled) == sorted(source.submitted)
    assert state.slots.under_way == 0


async def test_a_session_alone_is_no_way_back(app: Starlette, source: ScriptedSource) -> None:
    source.gate.clear()
    call = AsgiCall(app, URL, BODY, HEADERS | {"X-Session-ID": "s"})
    await source.first.wait()
    call.leave()
    await call.task
    assert source.cancelled == list(source.submitted)


async def test_behind_a_proxy_that_numbers_requests_another_header_is_the_way_back(
    state: AppState, source: ScriptedSource
) -> None:
    app = make_app(msgspec.structs.replace(state, request_id_header="X-Client-Request-ID"))
    source.gate.clear()
    for headers, cancelled in (({}, 1), ({"X-Client-Request-ID": "mine"}, 1)):
        source.first.clear()
        call = AsgiCall(app, URL, BODY, HEADERS | {"X-Request-ID": "the proxy's"} | headers)
        await source.first.wait()
        call.leave()
        await call.task
        assert len(source.cancelled) == cancelled


async def test_a_client_that_leaves_during_its_submit_ends_its_rollouts(
    app: Starlette, source: ScriptedSource, state: AppState
) -> None:
    source.acknowledges.clear()
    call = AsgiCall(app, URL, BODY | {"n": 2}, HEADERS)
    await source.asked.wait()
    call.leave()
    for _ in range(50):
        await asyncio.sleep(0)
    assert source.cancelled == []  # it could overtake the submit
    source.acknowledges.set()
    await call.task
    assert len(source.cancelled) == 2
    assert sorted(source.cancelled) == sorted(source.submitted)
    assert state.slots.under_way == 0


@pytest.mark.parametrize("ids", [{"X-Request-ID": "r"}, {"X-Request-ID": "r", "X-Session-ID": "s"}])
async def test_a_client_that_can_come_back_keeps_its_rollouts(
    app: Starlette, source: ScriptedSource, ids: dict[str, str]
) -> None:
    source.gate.clear()
    call = AsgiCall(app, URL, BODY | {"stream": True}, HEADERS | ids)
    await call.until(b"data: ")
    call.leave()
    await call.task
    assert source.cancelled == []


async def test_a_stream_resumes_from_its_beginning_under_its_id(
    app: Starlette, http: httpx.AsyncClient, source: ScriptedSource
) -> None:
    source.gate.clear()
    headers = HEADERS | {"X-Request-ID": "again"}
    call = AsgiCall(app, URL, BODY | {"stream": True}, headers)
    await call.until(b"data: ")
    call.leave()
    await call.task
    source.gate.set()
    whole = await http.post(URL, json=BODY | {"stream": True}, headers=headers)
    lines = [line.removeprefix("data: ") for line in whole.text.split("\n\n") if line.startswith("data: {")]
    assert "".join(msgspec.json.decode(line)["choices"][0]["text"] for line in lines) == "Hello world"
    assert len(source.submitted) == 1


async def test_a_client_that_leaves_while_it_sends_costs_nothing(
    app: Starlette, source: ScriptedSource, state: AppState
) -> None:
    call = AsgiCall(app, URL, None, HEADERS, pieces=[b'{"prompt":'])
    call.leave()
    await call.task
    assert source.submitted == {}
    assert state.slots.under_way == 0


@pytest.mark.parametrize(("path", "sign"), [(URL, b": waiting\n\n"), ("/v1/messages", b"event: ping\n")])
async def test_a_stream_that_waits_shows_that_it_lives(
    state: AppState, source: ScriptedSource, path: str, sign: bytes
) -> None:
    quick = RequestLimits(keep_alive_s=0.02)
    app = make_app(msgspec.structs.replace(state, limits=quick))
    source.gate.clear()
    body: dict[str, Any] = {"prompt": "x"} if path == URL else {"messages": [{"role": "user", "content": "x"}]}
    call = AsgiCall(app, path, body | {"stream": True, "max_tokens": 30}, HEADERS)
    await call.until(sign)
    source.gate.set()
    await call.task
    assert call.body.index(sign) < call.body.rindex(b"data: ")
    assert call.sent[-1]["more_body"] is False


async def test_the_time_until_a_sign_of_life_begins_with_the_last_event(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = list[float]()

    def timeout(seconds: float) -> asyncio.Timeout:
        waits.append(seconds)
        return asyncio.Timeout(None)

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(_message: Any) -> None: ...

    reply = HttpReply(receive, send, "r")
    await reply.departure(lambda: None, 15.0)
    await reply.begin_events()
    reply._sent_at -= 10.0
    monkeypatch.setattr("ebbtide.gateway.http.route.asyncio.timeout", timeout)
    await reply.departure(lambda: None, 15.0)
    assert waits == [pytest.approx(5.0, abs=2.0)]


async def test_a_call_that_takes_too_long_or_whose_client_leaves_holds_nothing(
    state: AppState, source: ScriptedSource
) -> None:
    app = make_app(msgspec.structs.replace(state, limits=RequestLimits(call_s=0.05)))
    patient = make_app(state)
    source.gate.clear()
    asking = AsgiCall(app, URL, BODY, HEADERS | {"X-Session-ID": "s", "X-Request-ID": "r"})
    await source.first.wait()
    asking.leave()
    await asking.task
    late = AsgiCall(app, "/v1/sessions/s/end", {"verifier": "x"}, HEADERS)
    await late.task
    assert late.status == 400, "the run has no verifiers"
    source.run = msgspec.structs.replace(
        source.run, spec=msgspec.structs.replace(source.run.spec, trainer=TrainerSpec(name="external"))
    )
    stuck = AsgiCall(app, "/v1/sessions/s/reward", {"reward": 1.0}, HEADERS)
    await stuck.task
    assert (stuck.status, b"more than 0.05 s" in stuck.body) == (503, True)
    left = AsgiCall(patient, "/v1/sessions/s/reward", {"reward": 1.0}, HEADERS)
    await wait_until(lambda: source.cancelled)
    left.leave()
    await left.task
    assert state.slots.under_way == 0
    source.gate.set()
    ended = AsgiCall(patient, "/v1/sessions/s/reward", {"reward": 1.0}, HEADERS)
    await ended.task
    assert ended.status == 200


@pytest.mark.parametrize(
    ("path", "failure"),
    [
        (URL, lambda lines: lines[-2].startswith('data: {"error":{"message":"the completion was given up')),
        ("/v1/messages", lambda lines: lines[-1].startswith('event: error\ndata: {"type":"error","error":')),
        ("/v1/responses", lambda lines: lines[-1].startswith("event: error\n")),
    ],
)
async def test_an_error_midway_is_the_last_event(
    http: httpx.AsyncClient, source: ScriptedSource, path: str, failure: Callable[[list[str]], bool]
) -> None:
    source.break_off = FinishReason.DEAD_LETTERED
    bodies: dict[str, Any] = {
        URL: {"prompt": "x"},
        "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 30},
        "/v1/responses": {"input": "x"},
    }
    answer = await http.post(path, json=bodies[path] | {"stream": True})
    assert answer.status_code == 200
    lines = [block for block in answer.text.split("\n\n") if block]
    assert failure(lines), answer.text
    assert "evidence" in answer.text


async def test_a_completion_that_is_given_up_fails_the_whole_answer(
    http: httpx.AsyncClient, source: ScriptedSource
) -> None:
    source.break_off = FinishReason.CANCELLED
    answer = await http.post(URL, json=BODY | {"n": 2})
    assert answer.status_code == 503
    assert "cancelled" in answer.json()["error"]["message"]


async def test_a_request_has_its_time(state: AppState, source: ScriptedSource) -> None:
    app = make_app(msgspec.structs.replace(state, limits=RequestLimits(request_s=0.02)))
    source.gate.clear()
    call = AsgiCall(app, URL, BODY, HEADERS)
    await call.task
    assert call.status == 503
    assert sorted(source.cancelled) == sorted(source.submitted)


@pytest.mark.parametrize(
    ("refusal", "status", "wait"),
    [(NoCapacity("full", retry_after_s=2.5), 429, "3"), (Unavailable("away"), 503, "1"), (Internal("x"), 500, None)],
)
async def test_what_the_coordinator_refuses_is_told(
    http: httpx.AsyncClient, source: ScriptedSource, refusal: Any, status: int, wait: str | None
) -> None:
    source.refusal = refusal
    answer = await http.post(URL, json=BODY)
    assert answer.status_code == status
    assert answer.headers.get("retry-after") == wait
    assert "look for this id" in answer.text if status == 500 else str(refusal) in answer.text


async def test_a_slow_reader_holds_back_the_completions_and_not_the_memory(
    app: Starlette, source: ScriptedSource
) -> None:
    source.answer, source.chunk = "the dog " * 100, 1
    taken = 0
    tokens = source.tokens

    async def counted(rollout_id: str) -> Any:
        nonlocal taken
        async for chunk in tokens(rollout_id):
            taken += 1
            yield chunk

    source.tokens = counted  # type: ignore[method-assign]
    call = AsgiCall(app, URL, {"prompt": "x", "max_tokens": 100, "n": 4, "stream": True}, HEADERS)
    await call.until(b"data: ")
    async with call.news:  # nothing is sent meanwhile
        began, before = taken, -1
        while taken != before:
            before = taken
            for _ in range(200):
                await asyncio.sleep(0)
        assert taken - began < 30
    await call.task
    assert taken == 400
