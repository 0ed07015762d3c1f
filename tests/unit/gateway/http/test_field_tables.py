"""The tables of fields name all that clients can send, and requests obey them."""

import ast
import importlib.util
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from starlette.applications import Starlette
from starlette.routing import Route

from ebbtide.gateway.dialects.anthropic import MESSAGES_FIELDS
from ebbtide.gateway.dialects.chat import CHAT_FIELDS
from ebbtide.gateway.dialects.completions import COMPLETION_FIELDS
from ebbtide.gateway.dialects.fields import ANY, RouteFields
from ebbtide.gateway.dialects.responses import RESPONSES_FIELDS
from ebbtide.gateway.dialects.token_generate import GENERATE_FIELDS, TOKEN_SAMPLING_FIELDS
from ebbtide.gateway.http.text_route import TextRoute
from ebbtide.reference.gateway_fields import TABLES

HELLO: Final = [{"role": "user", "content": "hello"}]
#: A body that each route serves.
SERVED: Final[dict[str, dict[str, Any]]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": HELLO},
    "/inference/v1/generate": {"token_ids": [1], "sampling_params": {}},
    "/generate": {"text": "x"},
    "/tokenize": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 9},
}
#: The tables of whole bodies: the others are of objects inside.
ROUTES: Final = {table.route: table for table in TABLES if table.route.startswith("/") and ":" not in table.route}


def test_each_route_that_takes_a_dialect_has_a_table_and_each_table_a_body_to_try(app: Starlette) -> None:
    routed = {one.path for one in app.routes if isinstance(one, Route) and isinstance(one.endpoint, TextRoute)}
    assert routed | {"/tokenize"} == set(ROUTES) == set(SERVED)


def vllm_fields(path: str, name: str) -> set[str]:
    """The fields of a class of vLLM's, read without importing it."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vllm is not installed here")
    tree = ast.parse((Path(spec.origin).parent / path).read_text())
    (found,) = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name]
    lines = [line.target for line in found.body if isinstance(line, ast.AnnAssign)]
    return {target.id for target in lines if isinstance(target, ast.Name) and not target.id.startswith("_")}


@pytest.mark.parametrize(
    ("table", "parameters"),
    [
        (COMPLETION_FIELDS, completion_create_params.CompletionCreateParamsBase),
        (CHAT_FIELDS, chat_create_params.CompletionCreateParamsBase),
        (RESPONSES_FIELDS, response_create_params.ResponseCreateParamsBase),
    ],
    ids=lambda value: getattr(value, "route", ""),
)
def test_every_parameter_of_the_openai_client_is_in_the_table(table: RouteFields, parameters: Any) -> None:
    assert set(parameters.__annotations__) - set(table.rules) == set()


def test_every_parameter_of_the_anthropic_client_is_in_the_table() -> None:
    from anthropic.types.message_create_params import MessageCreateParamsBase

    assert set(MessageCreateParamsBase.__annotations__) - set(MESSAGES_FIELDS.rules) == set()


@pytest.mark.parametrize(
    ("table", "path", "name"),
    [
        (COMPLETION_FIELDS, "entrypoints/openai/completion/protocol.py", "CompletionRequest"),
        (CHAT_FIELDS, "entrypoints/openai/chat_completion/protocol.py", "ChatCompletionRequest"),
        (GENERATE_FIELDS, "entrypoints/scale_out/token_in_token_out/protocol.py", "GenerateRequest"),
        (TOKEN_SAMPLING_FIELDS, "sampling_params.py", "SamplingParams"),
        (RESPONSES_FIELDS, "entrypoints/openai/responses/protocol.py", "ResponsesRequest"),
        (MESSAGES_FIELDS, "entrypoints/anthropic/protocol.py", "AnthropicMessagesRequest"),
    ],
    ids=lambda value: getattr(value, "route", ""),
)
def test_every_field_of_vllms_route_is_in_the_table(table: RouteFields, path: str, name: str) -> None:
    assert vllm_fields(path, name) - set(table.rules) == set()


@pytest.mark.parametrize("route", ROUTES)
async def test_unknown_and_refused_fields_are_named(http: httpx.AsyncClient, route: str) -> None:
    assert (await http.post(route, json=SERVED[route])).status_code == 200
    refused = [name for name, rule in ROUTES[route].rules.items() if rule.support == "refused"]
    assert refused
    for name in [*refused, "temprature", "x" * 3000]:
        answer = await http.post(route, json=SERVED[route] | {name: {"a": 1}})
        assert answer.status_code == 400, name
        assert answer.json()["error"]["message"].startswith(name[:100]), answer.text


@pytest.mark.parametrize("route", ROUTES)
async def test_values_that_change_nothing_are_accepted_and_others_named(http: httpx.AsyncClient, route: str) -> None:
    for name, rule in ROUTES[route].rules.items():
        if rule.support != "neutral":
            continue
        accepted = [None, {"any": "value"}] if rule.neutral == ANY else [None, *rule.neutral]
        for value in accepted:
            answer = await http.post(route, json=SERVED[route] | {name: value})
            assert answer.status_code == 200, (name, value, answer.text)
        if rule.neutral != ANY:
            answer = await http.post(route, json=SERVED[route] | {name: "something else"})
            assert answer.status_code == 400
            assert answer.json()["error"]["message"].startswith(f"{name}: not supported")


async def test_a_near_miss_is_told_what_was_meant(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json={"prompt": "x", "temprature": 0.5})
    assert "did you mean temperature?" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "temprature"
