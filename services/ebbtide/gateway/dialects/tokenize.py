"""Reads the body of /tokenize."""

from typing import Any, Final

import msgspec
from msgspec import Struct

from ebbtide.errors import InvalidRequest
from ebbtide.gateway.dialects.chat import read_messages, read_tools
from ebbtide.gateway.dialects.fields import (
    ONE_RUN,
    TEXT_ONLY,
    RouteFields,
    neutral,
    refused,
    supported,
)
from ebbtide.gateway.request import ChatPrompt, Prompt, RawPrompt

TOKENIZE_FIELDS: Final = RouteFields(
    route="/tokenize",
    rules={
        "model": supported(ONE_RUN),
        "prompt": supported("a text; or messages"),
        "messages": supported("a chat, rendered by the model's template"),
        "add_special_tokens": supported("default true for a prompt, false for messages"),
        "add_generation_prompt": supported("default true"),
        "return_token_strs": supported("answers token_strs"),
        "tools": supported("functions, handed to the chat template"),
        "chat_template_kwargs": supported("handed to the chat template"),
        "chat_template": refused("only the model's own template is rendered"),
        "continue_final_message": neutral(False, why="a message is always rendered complete"),
        "media_io_kwargs": neutral({}, why=TEXT_ONLY),
        "mm_processor_kwargs": neutral({}, why=TEXT_ONLY),
    },
)


class TokenizeBody(Struct, kw_only=True):
    model: str = ""
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    tools: list[Any] = msgspec.field(default_factory=list)
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)


def tokenized_prompt(asked: TokenizeBody) -> Prompt:
    """Raises `InvalidRequest` naming `prompt`."""
    if (asked.prompt is None) == (asked.messages is None):
        raise InvalidRequest("give prompt or messages, and not both", field="prompt")
    if asked.prompt is not None:
        return RawPrompt(asked.prompt, asked.add_special_tokens is not False)
    return ChatPrompt(
        messages=read_messages(asked.messages or ()),
        tools=read_tools(asked.tools) or None,
        template_options=asked.chat_template_kwargs,
        generate=asked.add_generation_prompt,
        special=bool(asked.add_special_tokens),
    )
