"""Types the body of /tokenize."""

from typing import Any

import msgspec
from msgspec import Struct


class TokenizeBody(Struct, kw_only=True):
    model: str = ""
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    tools: list[Any] = msgspec.field(default_factory=list)
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
