"""Draws requests that nobody means well with. The same seed draws the same ones."""

import json
from collections.abc import Callable
from random import Random
from typing import Any, Final

from msgspec import Struct

from tests.integration.gateway.hostile.hostile_server import LIMITS
from tests.unit.gateway.http.test_field_tables import HELLO, SERVED
from tests.unit.gateway.http.test_request_bounds import mutated

#: Ids that several clients use, each for requests of its own.
_SHARED_IDS: Final = [f"shared-{number}" for number in range(8)]


class HostileRequest(Struct, frozen=True, kw_only=True):
    """Bytes for one connection. `waits`: the client stays and reads; else it leaves at once, or in the answer."""

    kind: str
    data: bytes
    waits: bool = True
    leaves_early: bool = False


def draw_request(random: Random, keys: list[str]) -> HostileRequest:
    """One request, under one of `keys` or without any."""
    kind = random.choices(list(_KINDS), [weight for weight, _ in _KINDS.values()])[0]
    made = _KINDS[kind][1](random, random.choice(keys))
    return HostileRequest(
        kind=kind,
        data=made,
        waits=kind not in ("unfinished body", "unfinished head") or random.random() < 0.1,
        leaves_early=random.random() < 0.1,
    )


def post(path: str, body: bytes, key: str, *more: str, length: int | None = None) -> bytes:
    """A whole request, whose length may be a lie."""
    head = [
        f"POST {path} HTTP/1.1",
        "host: gateway",
        f"authorization: Bearer {key}",
        "connection: close",
        f"content-length: {len(body) if length is None else length}",
        *more,
    ]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def _mutated(random: Random, key: str) -> bytes:
    path = random.choice(list(SERVED))
    full = SERVED[path] | {"stop": ["a"], "tools": [_tool({})], "stream": True, "n": 2}
    body = json.dumps(mutated(random, full if random.random() < 0.5 else SERVED[path])).encode()
    return post(path, body, key)


def _giant(random: Random, key: str) -> bytes:
    size = random.choice([LIMITS.body_bytes - 200, LIMITS.body_bytes + 1, 2 * LIMITS.body_bytes])
    part, count = random.choice([("[],", 3), ("{},", 3), ('"a",', 4), ("9,", 2), ("1e9,", 4), ('"\\u0000",', 9)])
    name = random.choice(["prompt", "messages", "stop", "tools", "logit_bias", "input", "unknown"])
    body = f'{{"{name}": [{part * (size // count)}0]}}'
    return post(random.choice(list(SERVED)), body.encode(), key)


def _giant_text(random: Random, key: str) -> bytes:
    text = random.choice(["a", "\\ud83d", " ", "<|im_start|>", "{{", "\\n", "漢"]) * random.choice([5_000, 60_000])
    content = random.choice([f'"{text}"', f'[{{"type": "text", "text": "{text}"}}]'])
    return post("/v1/chat/completions", f'{{"messages": [{{"role": "user", "content": {content}}}]}}'.encode(), key)


def _many_fields(random: Random, key: str) -> bytes:
    body = json.dumps({f"{random.random()}": number for number in range(20_000)})
    return post(random.choice(list(SERVED)), body.encode(), key)


def _huge_number(random: Random, key: str) -> bytes:
    number = random.choice(["9" * 5000, "-" + "9" * 5000, "1e" + "9" * 400, "0." + "0" * 5000 + "1"])
    field = random.choice(["max_tokens", "n", "temperature", "priority", "prompt", "seed"])
    return post("/v1/completions", f'{{"prompt": "x", "{field}": {number}}}'.encode(), key)


def _nested(random: Random, key: str) -> bytes:
    depth = random.choice([60, 70, 1000, 100_000])
    opening, closing = random.choice([("[", "]"), ('{"items":', "}"), ('[{"a":', "}]")])
    body = '{"messages": ' + opening * depth + "1" + closing * depth + "}"
    return post("/v1/chat/completions", body.encode(), key)


def _exploding_schema(random: Random, key: str) -> bytes:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(random.choice([5, 12, 25, 55])):
        schema = {"type": "array", "items": schema}
    return post("/v1/chat/completions", json.dumps({"messages": HELLO, "tools": [_tool(schema)]}).encode(), key)


def _odd_tools(random: Random, key: str) -> bytes:
    tools = [mutated(random, _tool({"type": "object", "properties": {"q": {"type": "string"}}})) for _ in range(4)]
    options = {"enable_thinking": mutated(random, True), f"{random.random()}": "{{ 1/0 }}"}
    body = {"messages": HELLO, "tools": tools, "chat_template_kwargs": options}
    return post("/v1/chat/completions", json.dumps(body).encode(), key)


def _anothers_ids(random: Random, key: str) -> bytes:
    """Ids that other keys use, too, with a body of its own each time."""
    path = random.choice(["/v1/completions", f"/sessions/{random.choice(_SHARED_IDS)}/v1/completions"])
    ids = f"x-request-id: {random.choice(_SHARED_IDS)}-{random.random()}", f"x-session-id: {random.choice(_SHARED_IDS)}"
    return post(path, b'{"prompt": "x", "max_tokens": 4}', key, *ids)


def _session_route(random: Random, key: str) -> bytes:
    """What is known of a session, or its end, under an id that other keys have sessions of, too."""
    name, end = random.choice(_SHARED_IDS), random.choice(["", "/completions", "/reward", "/end"])
    body = random.choice([b"{}", b'{"reward": 1e400}', b'{"reward": 1}', b'{"drop_reason": "\\u0000"}', b"[]"])
    asked = post(f"/v1/sessions/{name}{end}", body, key)
    return asked.replace(b"POST", b"GET", 1) if random.random() < 0.3 else asked


def _malformed(random: Random, key: str) -> bytes:
    whole = bytearray(post("/v1/completions", b'{"prompt": "x"}', key))
    for _ in range(random.choice([1, 3, 30])):
        whole[random.randrange(len(whole))] = random.randrange(256)
    return bytes(whole)


def _noise(random: Random, _key: str) -> bytes:
    return random.randbytes(random.choice([1, 100, 70_000]))


def _smuggled(random: Random, key: str) -> bytes:
    more = random.choice(["transfer-encoding: chunked", "content-length: 3", "expect: 100-continue"])
    return post("/v1/completions", b"0\r\n\r\nGET / HTTP/1.1\r\n\r\n", key, more)


def _long_head(random: Random, key: str) -> bytes:
    long = "a" * random.choice([70_000, 200_000])
    return random.choice([post(f"/v1/{long}", b"{}", key), post("/generate", b"{}", key, f"x-long: {long}")])


def _unfinished_body(random: Random, key: str) -> bytes:
    return post("/v1/completions", b'{"prompt": "' + b"x" * random.choice([0, 500_000]), key, length=900_000)


def _unfinished_head(random: Random, key: str) -> bytes:
    return post("/v1/completions", b"", key)[: random.randrange(1, 80)]


def _other_path(random: Random, key: str) -> bytes:
    paths = [
        "/",
        "/../etc/passwd",
        "/update_weights",
        "/%00",
        "/sessions//v1/models",
        "/sessions/x",
        "/v1/%2e%2e",
    ]
    return post(random.choice(paths), b"{}", random.choice([key, "wrong", "a.b.c", "x" * 5000]))


def _tool(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


#: How often each kind comes, and how it is drawn. What takes seconds comes seldom.
_KINDS: Final[dict[str, tuple[float, Callable[[Random, str], bytes]]]] = {
    "mutated": (30, _mutated),
    "giant": (3, _giant),
    "giant text": (3, _giant_text),
    "many fields": (1, _many_fields),
    "huge number": (5, _huge_number),
    "nested": (4, _nested),
    "exploding schema": (2, _exploding_schema),
    "odd tools": (8, _odd_tools),
    "another's ids": (15, _anothers_ids),
    "session route": (4, _session_route),
    "malformed": (10, _malformed),
    "noise": (5, _noise),
    "smuggled": (5, _smuggled),
    "long head": (2, _long_head),
    "unfinished body": (2, _unfinished_body),
    "unfinished head": (2, _unfinished_head),
    "other path": (5, _other_path),
}
