"""Speaks /v1/chat/completions."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from ebbtide.errors import InvalidRequest
from ebbtide.gateway.dialects.dialect import AskedText
from ebbtide.gateway.dialects.openai.chat_answer import ChatAnswer
from ebbtide.gateway.dialects.openai.chat_messages import read_messages, read_tools
from ebbtide.gateway.dialects.request_bodies import Completions, Count, SharedBody, stream_options
from ebbtide.gateway.fields.openai_fields import CHAT_FIELDS
from ebbtide.gateway.generation.text_request import ChatPrompt, TextRequest
from ebbtide.types.parse import parse

#: Template options that say what other fields say.
_OWN_OPTIONS: Final = ("messages", "tools", "add_generation_prompt", "continue_final_message")
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatBody(SharedBody, kw_only=True):
    messages: list[Any]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n: Completions = 1
    logprobs: bool = False
    tools: list[Any] = msgspec.field(default_factory=list)
    tool_choice: Any = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(max_length=64)] = msgspec.field(default_factory=dict)
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    include_reasoning: bool = True
    return_tokens_as_token_ids: bool = False


class ChatDialect:
    """Reads and answers chats."""

    def __init__(self, *, max_messages: int, max_tools: int) -> None:
        self._max_messages, self._max_tools = max_messages, max_tools

    def read(self, body: Mapping[str, Any]) -> AskedText:
        asked = parse(ChatBody, CHAT_FIELDS.checked(body))
        options = stream_options(asked.stream_options, stream=asked.stream)
        request = TextRequest(
            model=asked.model,
            prompts=[self._prompt(asked)],
            sampling=asked.sampling(),
            max_tokens=_max_tokens(asked),
            n=asked.n,
            stop=asked.stops(),
            keep_stop=asked.include_stop_str_in_output,
            skip_special=asked.skip_special_tokens,
            parse_tools=calls_tools(asked.tool_choice, asked.tools),
            logprobs=asked.logprobs,
            stream=asked.stream,
            priority=asked.priority,
            versions=asked.weight_version.wish(),
            request_id=asked.request_id,
            session_id=asked.session_id,
        )
        return AskedText(
            request,
            lambda context: ChatAnswer(
                context,
                logprobs=asked.logprobs,
                token_ids=asked.return_token_ids,
                names_as_ids=asked.return_tokens_as_token_ids,
                reasoning=asked.include_reasoning,
                usage=options.include_usage,
                running_usage=options.continuous_usage_stats,
            ),
        )

    def _prompt(self, asked: ChatBody) -> ChatPrompt:
        check_count(asked.messages, self._max_messages, field="messages")
        check_count(asked.tools, self._max_tools, field="tools")
        return ChatPrompt(
            messages=read_messages(asked.messages),
            tools=read_tools(asked.tools) or None,
            template_options=template_options(asked.chat_template_kwargs, asked.reasoning_effort),
            generate=asked.add_generation_prompt,
            special=asked.add_special_tokens,
        )


def check_count(items: list[Any], most: int, *, field: str) -> None:
    if len(items) > most:
        raise InvalidRequest(f"has {len(items)} entries; this gateway takes at most {most}", field=field)


def template_options(given: Mapping[str, Any], effort: Effort | None) -> dict[str, Any]:
    """What a chat template is handed beside messages and tools. Raises `InvalidRequest` naming the option."""
    for name in _OWN_OPTIONS:
        if name in given:
            raise InvalidRequest("is a field of its own; set that", field=f"chat_template_kwargs.{name}")
    if effort is None:
        return dict(given)
    # As vLLM does, for templates whose models think only if they are told to.
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"} | dict(given)


def calls_tools(choice: Any, tools: list[Any]) -> bool:
    """Whether the answer is searched for tool calls. Raises `InvalidRequest` naming `tool_choice`."""
    if choice is None:
        return bool(tools)
    if choice not in ("auto", "none"):
        raise InvalidRequest(
            "not supported: only a grammar can make a model call a tool, and a completion that goes on at another "
            "worker could not continue it exactly; use auto or none",
            field="tool_choice",
        )
    if choice == "auto" and not tools:
        raise InvalidRequest("auto needs tools; name some, or leave it out", field="tool_choice")
    return bool(choice == "auto")


def _max_tokens(asked: ChatBody) -> int | None:
    if None not in (asked.max_tokens, asked.max_completion_tokens) and asked.max_tokens != asked.max_completion_tokens:
        raise InvalidRequest("differs from max_completion_tokens; give one of them", field="max_tokens")
    return asked.max_completion_tokens or asked.max_tokens
