"""Tokens in, tokens out: what was sampled is never templated again."""

import json
from pathlib import Path
from typing import Any

import pytest

from ebbtide.environments import Message
from ebbtide.errors import InvalidRequest
from ebbtide.run_client import Conversations, load_conversations
from ebbtide.trainer.base_model.base_model import CHAT_TEMPLATE, character_tokenizer

OPENING = [Message("user", "ab")]
ANSWER = [Message("user", "again")]
#: As many templates: the turn's end is followed by a newline that is not sampled, and white space is trimmed.
OTHER_TEMPLATE = (
    "{% for message in messages %}{{ '<|user|>' + message.role + '\n' + message.content | trim + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|user|>assistant\n' }}{% endif %}"
)


def conversations(template: str | None, *, context: int = 0) -> tuple[Conversations, Any]:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = template
    return Conversations(tokenizer, context=context, end_ids=frozenset([tokenizer.eos_token_id])), tokenizer


def encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, OTHER_TEMPLATE])
def test_prompt_response_and_what_follows_are_what_the_template_renders_of_the_whole(template: str) -> None:
    chat, tokenizer = conversations(template)
    response = [*encode(tokenizer, "xyz"), tokenizer.eos_token_id]
    together = chat.opening(OPENING) + response + chat.following(OPENING, response, ANSWER)
    messages = [*OPENING, Message("assistant", "xyz"), *ANSWER]
    whole = tokenizer.apply_chat_template(
        [message.as_dict() for message in messages], tokenize=False, add_generation_prompt=True
    )
    assert together == encode(tokenizer, whole)


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, OTHER_TEMPLATE])
def test_a_response_cut_short_is_closed_by_the_template(template: str) -> None:
    chat, tokenizer = conversations(template)
    cut = encode(tokenizer, "xy")
    ended = [*cut, tokenizer.eos_token_id]
    assert cut + chat.following(OPENING, cut, ANSWER) == ended + chat.following(OPENING, ended, ANSWER)


def test_without_a_template_messages_are_raw_text() -> None:
    chat, tokenizer = conversations(None)
    assert chat.opening(OPENING) == encode(tokenizer, "ab")
    assert chat.following(OPENING, encode(tokenizer, "x"), ANSWER) == encode(tokenizer, "again")


def test_the_text_of_a_response_leaves_out_its_end_alone() -> None:
    chat, tokenizer = conversations(CHAT_TEMPLATE)
    ids = encode(tokenizer, "a b,c\n.")
    assert chat.text([*ids, tokenizer.eos_token_id]) == "a b,c\n."
    assert chat.text(ids) == "a b,c\n."
    assert chat.text([]) == ""


def test_a_template_that_refuses_the_messages_names_the_model() -> None:
    chat, _ = conversations("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        chat.opening(OPENING)
    assert caught.value.field == "model"


def test_a_template_without_assistant_turns_allows_one_turn_only() -> None:
    chat, _ = conversations("{{ messages[0].content }}")
    assert chat.opening(OPENING)
    with pytest.raises(InvalidRequest, match="one turn only"):
        chat.following(OPENING, [5], ANSWER)


def test_prompts_that_do_not_fit_the_context_are_refused_with_a_remedy() -> None:
    chat, _ = conversations(None, context=2)
    with pytest.raises(InvalidRequest, match="prompt of 2 tokens leaves no room in the model's context of 2"):
        chat.opening(OPENING)
    with pytest.raises(InvalidRequest, match="no token"):
        chat.opening([Message("user", "")])


def test_a_checkpoint_tells_its_context_and_all_tokens_that_end_a_response(tiny_model: Path) -> None:
    chat = load_conversations(str(tiny_model), stop_token_ids=[77])
    assert chat.context == json.loads((tiny_model / "config.json").read_text())["max_position_embeddings"]
    assert chat.end_ids == {2, 77}


def test_loading_tokens_takes_no_torch(tiny_model: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys, ebbtide.driver.service; from ebbtide.run_client import load_conversations;"
        f"load_conversations({str(tiny_model)!r}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
