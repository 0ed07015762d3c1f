"""Prompts' tokens are estimated from bodies."""

import json
from typing import Any

import pytest

from ebbtide.serving_guard.proxy.request_timing import (
    PromptEstimate,
    PromptEstimator,
    SseTokenCounter,
    estimate_prompt,
    usage_of,
)


@pytest.mark.parametrize(
    ("body", "tokens", "text"),
    [
        ({"prompt": [1, 2, 3]}, 3, 0),
        ({"prompt": [[1, 2], [3]]}, 3, 0),
        ({"prompt": "x" * 40}, 0, 42),
        ({"prompt": ["ab", "cd"]}, 0, 12),
        ({"prompt": None}, 0, 0),
        ({"token_ids": [5] * 9}, 9, 0),
        ({"input": "x" * 38, "instructions": "y" * 8}, 0, 50),
    ],
)
def test_lists_of_tokens_are_counted_and_text_is_measured(body: dict[str, Any], tokens: int, text: int) -> None:
    asked = estimate_prompt(json.dumps({"model": "m", "stream": True, **body}).encode())
    assert (asked.model, asked.streamed, asked.tokens, asked.text_bytes) == ("m", True, tokens, text)


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"max_tokens": 500}, 500),
        ({"max_tokens": 500, "stream": True}, 0),
        ({"max_completion_tokens": 70, "n": 3}, 210),
        ({"max_output_tokens": 9, "max_tokens": None}, 9),
        ({"max_tokens": "many", "n": []}, 0),
        ({"max_tokens": -5}, 0),
        ({"max_tokens": 10**15}, 1 << 22),
    ],
)
def test_an_answer_in_one_piece_counts_from_the_start_for_what_it_may_become(body: dict[str, Any], tokens: int) -> None:
    asked = estimate_prompt(json.dumps({"model": "m", "prompt": [1, 2], **body}).encode())
    assert (asked.model, asked.answer_tokens) == ("m", tokens)
    assert PromptEstimator().tokens(asked) == 2 + tokens


def test_images_are_not_their_bytes() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}
    asked = estimate_prompt(json.dumps({"messages": [{"role": "user", "content": [image]}]}).encode())
    assert asked.tokens == 1000
    assert asked.text_bytes < 200


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"model": 3}', b"\xff\xff", b'{"stream": "x"}'])
def test_an_odd_body_counts_by_its_length(body: bytes) -> None:
    assert estimate_prompt(body) == PromptEstimate(text_bytes=len(body))


def test_a_name_too_long_for_a_model_is_none() -> None:
    assert estimate_prompt(json.dumps({"model": "m" * 256}).encode()).model == "m" * 256
    assert estimate_prompt(json.dumps({"model": "m" * 257, "prompt": [1, 2]}).encode()) == PromptEstimate(tokens=2)


def test_a_body_nested_without_end_is_no_more_than_odd() -> None:
    body = b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert estimate_prompt(body) == PromptEstimate(text_bytes=len(body))
    assert usage_of(body) is None
    assert SseTokenCounter().feed(b"data: " + body + b"\n\n") == 1


def test_bytes_per_token_are_learnt_of_each_model() -> None:
    estimator = PromptEstimator()
    asked, other = PromptEstimate(model="a", text_bytes=4000), PromptEstimate(model="b", text_bytes=4000)
    assert estimator.tokens(asked) == 1000
    for _ in range(50):
        estimator.learn(asked, 2000)
    assert estimator.tokens(asked) == 2000
    assert estimator.tokens(other) == 1000
    for number in range(1000):
        estimator.learn(PromptEstimate(model=f"m{number}", text_bytes=10), 1)
    assert len(estimator._ratios) <= 64


def test_counted_prompts_teach_nothing_about_text() -> None:
    estimator = PromptEstimator()
    estimator.learn(PromptEstimate(model="a", tokens=3, text_bytes=10), 100)
    estimator.learn(PromptEstimate(model="a", text_bytes=10), 0)
    assert estimator.tokens(PromptEstimate(model="a", text_bytes=400)) == 100
