"""Tokens in streamed answers are counted, however the bytes are cut."""

import json
from typing import Any

import pytest

from ebbtide.serving_guard.proxy.request_timing import SseTokenCounter


def event(what: Any) -> bytes:
    return b"data: " + json.dumps(what).encode() + b"\n\n"


CHAT = b"".join(
    [
        event({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}], "usage": None}),
        event({"choices": [{"delta": {"content": "a"}, "finish_reason": None}]}),
        event({"choices": [{"delta": {"reasoning_content": "b"}, "finish_reason": None}]}),
        event({"choices": [{"delta": {"tool_calls": [{"index": 0}]}, "finish_reason": None}]}),
        event({"choices": [{"delta": {"content": ""}, "finish_reason": "stop"}]}),
        b"data: [DONE]\n\n",
    ]
)
RESPONSES = b"".join(
    [
        b'event: response.created\ndata: {"type":"response.created","response":{"usage":null}}\n\n',
        b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"a"}\n\n' * 3,
        (
            b'event: response.completed\ndata: {"type":"response.completed","response":'
            b'{"usage":{"input_tokens":11,"output_tokens":4}}}\n\n'
        ),
    ]
)
MESSAGES = b"".join(
    [
        event({"type": "message_start", "message": {"usage": {"input_tokens": 5, "output_tokens": 0}}}),
        event({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}}),
        event({"type": "message_delta", "delta": {}, "usage": {"output_tokens": 1}}),
        event({"type": "message_stop"}),
    ]
)


@pytest.mark.parametrize(("stream", "tokens"), [(CHAT, 4), (RESPONSES, 4), (MESSAGES, 1)])
@pytest.mark.parametrize("size", [1, 2, 7, 100, 10_000])
@pytest.mark.parametrize("ends", [b"\n", b"\r\n"])
def test_tokens_are_counted_wherever_the_bytes_are_cut(stream: bytes, tokens: int, size: int, ends: bytes) -> None:
    stream = stream.replace(b"\n", ends)
    events = SseTokenCounter()
    assert sum(events.feed(stream[start : start + size]) for start in range(0, len(stream), size)) == tokens
    assert not events.failed


def test_usage_event_by_event_is_believed() -> None:
    events = SseTokenCounter()
    fed = [
        events.feed(event({"choices": [{"text": "x"}], "usage": {"prompt_tokens": 9, "completion_tokens": made}}))
        for made in (1, 4, 5)
    ]
    assert fed == [1, 3, 1]
    assert events.prompt_tokens == 9


def test_ids_of_tokens_say_how_many_an_event_holds() -> None:
    assert SseTokenCounter().feed(event({"choices": [{"text": "abc", "token_ids": [1, 2, 3]}, {"text": "d"}]})) == 4


@pytest.mark.parametrize(
    "odd", [b"data: {\n\n", b"data: 7\n\n", b'data: {"choices": 3}\n\n', b'data: {"token": 1}\n\n']
)
def test_an_event_that_is_not_understood_counts_as_one(odd: bytes) -> None:
    assert SseTokenCounter().feed(odd) == 1


def test_comments_and_empty_lines_are_none() -> None:
    assert SseTokenCounter().feed(b": ping\n\n\n\nevent: ping\n\nretry: 3\n\n") == 0


@pytest.mark.parametrize("error", [{"error": {"message": "x"}}, {"type": "error"}, {"type": "response.failed"}])
def test_an_error_inside_a_stream_is_noticed(error: dict[str, Any]) -> None:
    events = SseTokenCounter()
    assert events.feed(event(error)) == 0
    assert events.failed


def test_an_endless_event_is_not_kept() -> None:
    events = SseTokenCounter()
    counted = events.feed(b"data: ") + sum(events.feed(b"x" * 65536) for _ in range(64))
    assert counted == 1
    assert len(events._tail) <= 256 << 10
    assert events.feed(b"\n\n" + event({"choices": [{"text": "x"}]})) == 1
