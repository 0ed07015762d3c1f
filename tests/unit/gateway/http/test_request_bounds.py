"""Bodies that are too large, too deep, malformed or without a key; and how many requests may be under way."""

import asyncio
import json
import random
import threading
from typing import Any

import httpx
import msgspec
import pytest
from starlette.applications import Starlette

from ebbtide.errors import NoCapacity
from ebbtide.gateway.access import ClientKey, RequestLimits, RequestSlots
from ebbtide.gateway.http import route
from ebbtide.gateway.http.app import make_app
from ebbtide.gateway.http.route import AppState
from tests.fakes.asgi_call import AsgiCall
from tests.fakes.scripted_rollouts import ScriptedSource
from tests.support.waiting import wait_until
from tests.unit.gateway.http.conftest import HEADERS
from tests.unit.gateway.http.test_field_tables import SERVED

URL = "/v1/completions"


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    ("body", "status", "part"),
    [
        (b"", 400, "body: is no JSON"),
        (b"{", 400, "body: is no JSON"),
        (b"[1]", 400, "body: must be a JSON object"),
        (b'{"prompt": "\xff"}', 400, "body: is no JSON"),
        (b'{"prompt": NaN}', 400, "body: is no JSON"),
        (b'{"prompt": 1e999}', 400, "body: is no JSON"),
        (('{"logit_bias": ' + nested(70) + "}").encode(), 400, "body: nests deeper than 64"),
        (('{"logit_bias": ' + nested(20000) + "}").encode(), 400, "body: nests deeper than 64"),
        (b'{"prompt": "' + b"x" * 70000 + b'"}', 413, "body: has more than 65536 bytes"),
        (b'{"prompt": "x", "n": 100000}', 400, "n:"),
        (b'{"prompt": "x", "n": 129}', 400, "n: asks for 129 completions"),
        (b'{"prompt": [[]]}', 400, "prompt: holds no token"),
        (b'{"prompt": []}', 400, "prompt: is empty"),
        (b'{"prompt": [1, "x"]}', 400, "prompt"),
        (b'{"prompt": [-1]}', 400, "prompt"),
        (b'{"prompt": [4294967295]}', 400, "token ids are 0 to"),
        (b'{"prompt": [true]}', 400, "prompt"),
        (b'{"prompt": {"a": 1}}', 400, "prompt"),
        (b'{"prompt": "x", "max_tokens": 0}', 400, "max_tokens"),
        (b'{"prompt": "x", "max_tokens": 5000}', 400, "max_tokens: 5000 and a prompt"),
        (b'{"prompt": "x", "min_tokens": 40}', 400, "min_tokens"),
        (b'{"prompt": "x", "temperature": -1}', 400, "temperature"),
        (b'{"prompt": "x", "stop": [""]}', 400, "stop"),
        (b'{"prompt": "x", "stream_options": {"include_usage": true}}', 400, "stream_options"),
        (b'{"prompt": "x", "weight_version": {"min_version": 1, "exact_version": 2}}', 400, "weight_version"),
        (b'{"prompt": "x", "weight_version": {"newest": 1}}', 400, "weight_version.newest"),
        (msgspec.json.encode({"prompt": [1] * 201}), 400, "more than this gateway's 200"),
        (b'{"prompt": "x", "model": "another"}', 404, "no live run has the id or name 'another'"),
    ],
)
async def test_a_faulty_body_is_refused_by_name(
    http: httpx.AsyncClient, source: ScriptedSource, body: bytes, status: int, part: str
) -> None:
    answer = await http.post(URL, content=body)
    assert answer.status_code == status, answer.text
    assert part in answer.json()["error"]["message"]
    assert source.submitted == {}


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ({"messages": []}, "messages: is empty"),
        ({"messages": [{"role": "user", "content": "x"}] * 21}, "messages: has 21 entries"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": "x", "mood": "x"}]}, "messages[0].mood"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages[0].tool_calls[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 5}, "tools: has 5 entries"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"seed": 1}, "seed"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ],
)
async def test_a_faulty_chat_is_refused_by_name(http: httpx.AsyncClient, body: dict[str, Any], part: str) -> None:
    asked = {"messages": [{"role": "user", "content": "x"}]} | body
    answer = await http.post("/v1/chat/completions", json=asked)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"].startswith(part)


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}, {"authorization": "Basic x"}])
async def test_without_a_key_nothing_is_read(app: Starlette, source: ScriptedSource, headers: dict[str, str]) -> None:
    call = AsgiCall(app, URL, None, headers, pieces=[])
    await call.task
    assert call.status == 401
    assert source.submitted == {}


async def test_a_body_that_never_ends_has_its_time(state: AppState) -> None:
    app = make_app(msgspec.structs.replace(state, limits=RequestLimits(body_s=0.02)))
    call = AsgiCall(app, URL, None, HEADERS, pieces=[b"{", b'"'])
    await call.task
    assert call.status == 400
    assert b"did not arrive within 0.02 s" in call.body


async def test_a_body_has_a_bounded_number_of_lists_however_many_brackets_its_texts_have(
    state: AppState, source: ScriptedSource
) -> None:
    app = make_app(msgspec.structs.replace(state, limits=RequestLimits()))
    body = {"prompt": "x", "chat_template_kwargs": {"a": [list[Any]()] * 100_001}}
    call = AsgiCall(app, "/v1/chat/completions", body, HEADERS)
    await call.task
    assert call.status == 400
    assert b"more than 100000 objects and lists" in call.body
    text = AsgiCall(app, URL, {"prompt": "x", "user": '[{"\\' * 50_001}, HEADERS)
    await text.task
    assert text.status == 200


def test_a_text_without_an_end_is_looked_at_once() -> None:
    body = b"[" * 100_001 + b'"' + b'\\"' * 1_000_000
    assert route._has_more(body, 100_000), "looked at again from each quote, it takes hours"
    assert not route._has_more(b'"' + body, 100_000), "one text"


async def test_a_large_body_is_decoded_away_from_the_event_loop(
    state: AppState, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, check = list[threading.Thread](), route._check_depth

    def noting(*arguments: Any) -> None:
        threads.append(threading.current_thread())
        check(*arguments)

    monkeypatch.setattr(route, "_check_depth", noting)
    app = make_app(msgspec.structs.replace(state, limits=RequestLimits()))
    for size in (10, 100_000):
        await AsgiCall(app, URL, {"prompt": "x", "user": "x" * size}, HEADERS).task
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


async def test_a_key_has_a_bounded_number_of_requests(state: AppState, source: ScriptedSource) -> None:
    limits = RequestLimits(requests_per_key=2)
    app = make_app(msgspec.structs.replace(state, limits=limits, slots=RequestSlots(limits)))
    source.gate.clear()
    calls = [AsgiCall(app, URL, {"prompt": "x"}, HEADERS) for _ in range(3)]
    await asyncio.wait({call.task for call in calls}, return_when=asyncio.FIRST_COMPLETED)
    (refused,) = [call for call in calls if call.task.done()]
    assert refused.status == 429
    source.gate.set()
    await asyncio.gather(*(call.task for call in calls))
    assert sorted(call.status for call in calls) == [200, 200, 429]


async def test_a_key_has_a_bounded_number_of_completions(state: AppState, source: ScriptedSource) -> None:
    limits = RequestLimits(completions_per_key=200)
    slots = RequestSlots(limits)
    app = make_app(msgspec.structs.replace(state, limits=limits, slots=slots))
    source.gate.clear()
    first = AsgiCall(app, URL, {"prompt": "x", "n": 100}, HEADERS)
    await wait_until(lambda: len(source.submitted) == 100)
    refused = AsgiCall(app, URL, {"prompt": ["x", "y"], "n": 64}, HEADERS)
    await refused.task
    assert refused.status == 429
    assert b"200 completions under way" in refused.body
    source.gate.set()
    await first.task
    assert first.status == 200
    assert slots.completions == 0
    again = AsgiCall(app, URL, {"prompt": ["x", "y"], "n": 64}, HEADERS)
    await again.task
    assert again.status == 200


async def test_the_bodies_of_all_requests_have_bounded_bytes(state: AppState, encoding: asyncio.Event) -> None:
    limits = RequestLimits(body_bytes=1024, bodies_bytes=1500)
    slots = RequestSlots(limits)
    app = make_app(msgspec.structs.replace(state, limits=limits, slots=slots))
    body = {"prompt": "x", "user": "x" * 800}
    encoding.clear()
    first = AsgiCall(app, URL, body, HEADERS)
    await wait_until(lambda: slots.body_bytes)
    second = AsgiCall(app, URL, body, HEADERS)
    await second.task
    assert second.status == 429
    assert b"try again" in second.body
    encoding.set()
    await first.task
    assert (first.status, slots.body_bytes) == (200, 0)
    third = AsgiCall(app, URL, body, HEADERS)
    await third.task
    assert third.status == 200


@pytest.mark.parametrize("path", [path for path in SERVED if path != "/tokenize"])
async def test_a_long_answer_keeps_no_body(state: AppState, source: ScriptedSource, path: str) -> None:
    limits = RequestLimits()
    slots = RequestSlots(limits)
    app = make_app(msgspec.structs.replace(state, limits=limits, slots=slots))
    source.gate.clear()
    call = AsgiCall(app, path, SERVED[path], HEADERS)
    await source.first.wait()
    assert (slots.under_way, slots.body_bytes) == (1, 0)
    source.gate.set()
    await call.task
    assert call.status == 200
    assert slots.under_way == 0


def test_bodies_of_one_key_leave_room_for_those_of_others() -> None:
    slots = RequestSlots(RequestLimits(body_bytes=1024, bodies_bytes=4000, bodies_bytes_per_key=2000))
    alice, bob = ClientKey(owner="alice", sessions_of="alice"), ClientKey(owner="bob", sessions_of="bob")
    with slots.taken(alice) as first, slots.taken(alice) as second, slots.taken(bob) as other:
        first.add_body(1000)
        second.add_body(1000)
        with pytest.raises(NoCapacity, match="alice"):
            second.add_body(1)
        other.add_body(1000)
    assert slots.body_bytes == 0
    with slots.taken(alice) as again:
        again.add_body(1000)


async def test_a_path_with_a_slash_too_many_leads_nowhere_else(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions/", json={"prompt": "x"})
    assert answer.status_code == 404
    assert "location" not in answer.headers


async def test_ids_that_no_header_can_carry_are_refused(http: httpx.AsyncClient) -> None:
    answer = await http.post(URL, json={"prompt": "x", "request_id": "a\nb"})
    assert answer.status_code == 400
    assert "X-Request-ID" in answer.json()["error"]["message"]


async def test_routes_that_change_weights_are_not_there(http: httpx.AsyncClient) -> None:
    for path in ("/update_weights", "/load_lora_adapter", "/init_weight_transfer_engine", "/collective_rpc"):
        answer = await http.post(path, json={})
        assert answer.status_code == 404
        assert "is not served here" in answer.json()["error"]["message"]


def mutated(draw: random.Random, value: Any, depth: int = 0) -> Any:
    """A value like this one, with parts exchanged for what nobody sends."""
    odd: list[Any] = [
        None,
        True,
        -1,
        2**70,
        1e300,
        "",
        "\x00\ud800" * 9,
        [],
        {},
        [[]],
        [{}],
        {"type": "text"},
        [None] * 50,
    ]
    if draw.random() < 0.25 or depth > 6:
        return draw.choice(odd)
    if isinstance(value, dict):
        made = {key: mutated(draw, one, depth + 1) if draw.random() < 0.4 else one for key, one in value.items()}
        return made | (
            {draw.choice(["type", "x", "stream", "n", "stop"]): draw.choice(odd)} if draw.random() < 0.3 else {}
        )
    if isinstance(value, list):
        return [mutated(draw, one, depth + 1) for one in value]
    return value


async def test_no_hostile_body_is_an_internal_error(http: httpx.AsyncClient, state: AppState) -> None:
    draw = random.Random(18)
    statuses = set()
    for number in range(600):
        path = draw.choice(list(SERVED))
        full = SERVED[path] | {"stop": ["a"], "tools": [{"type": "function", "function": {"name": "f"}}]}
        body = json.dumps(mutated(draw, full if draw.random() < 0.5 else SERVED[path]))  # also halves of characters
        answer = await http.post(path, content=body)
        assert answer.status_code in (200, 400, 404), (number, path, answer.text)
        statuses.add(answer.status_code)
    assert {200, 400} <= statuses
    assert state.slots.under_way == 0
