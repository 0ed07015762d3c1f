"""Types the body of /tokenize."""

from typing import Any

from msgspec import Struct


class TokenizeBody(Struct, kw_only=True):
    model: str = ""
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    tools: list[Any] = []
    chat_template_kwargs: dict[str, Any] = {}
