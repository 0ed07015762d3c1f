"""Speaks /v1/messages."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from ebbtide.errors import InvalidRequest
from ebbtide.gateway.dialects.agents.agent_tools import read_agent_tools
from ebbtide.gateway.dialects.agents.message_answer import MessageAnswer
from ebbtide.gateway.dialects.agents.message_blocks import block_messages
from ebbtide.gateway.dialects.dialect import AskedText
from ebbtide.gateway.dialects.openai.chat import Effort, check_count, template_options
from ebbtide.gateway.dialects.request_bodies import Count, Priority, SamplingBody, WeightVersionBody
from ebbtide.gateway.fields.agent_fields import MESSAGES_FIELDS
from ebbtide.gateway.generation.text_request import ChatPrompt, TextRequest
from ebbtide.types.parse import parse


class _ToolChoice(Struct, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool = False  # as `parallel_tool_calls` on the other routes: nothing limits the calls


class _Thinking(Struct, forbid_unknown_fields=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class _OutputConfig(Struct, frozen=True, forbid_unknown_fields=True):
    effort: Effort | None = None


class MessagesBody(Struct, kw_only=True):
    messages: list[Any]
    max_tokens: Count
    model: str = ""
    system: str | list[dict[str, Any]] | None = None
    stream: bool = False
    stop_sequences: list[str] = msgspec.field(default_factory=list)
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] = 0
    tools: list[Any] = msgspec.field(default_factory=list)
    tool_choice: _ToolChoice | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig = _OutputConfig()
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    priority: Priority = 0
    weight_version: WeightVersionBody = WeightVersionBody()

    def sampled(self) -> SamplingBody:
        """The sampling, under the names of the other routes."""
        return SamplingBody(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, stop=self.stop_sequences)


class MessagesDialect:
    """Reads and answers messages."""

    def __init__(self, *, max_messages: int, max_tools: int) -> None:
        self._max_messages, self._max_tools = max_messages, max_tools

    def read(self, body: Mapping[str, Any]) -> AskedText:
        asked = parse(MessagesBody, MESSAGES_FIELDS.checked(body))
        sampled = asked.sampled()
        request = TextRequest(
            model=asked.model,
            prompts=[self.prompt(asked)],
            sampling=sampled.sampling(),
            max_tokens=asked.max_tokens,
            fits_context=True,
            stop=sampled.stops("stop_sequences"),
            parse_tools=_calls_tools(asked),
            stream=asked.stream,
            priority=asked.priority,
            versions=asked.weight_version.wish(),
        )
        return AskedText(request, MessageAnswer)

    def prompt(self, asked: MessagesBody) -> ChatPrompt:
        check_count(asked.messages, self._max_messages, field="messages")
        check_count(asked.tools, self._max_tools, field="tools")
        options = template_options(asked.chat_template_kwargs, asked.output_config.effort)
        return ChatPrompt(
            messages=block_messages(asked.messages, asked.system),
            tools=read_agent_tools(asked.tools, (None, "custom")) or None,
            template_options=_thinking_options(asked) | options,
        )


def _thinking_options(asked: MessagesBody) -> dict[str, Any]:
    thinking = asked.thinking
    if thinking is None:
        return {}
    if thinking.budget_tokens is not None and thinking.budget_tokens < asked.max_tokens - 1:
        raise InvalidRequest(
            "not supported: the workers do not count thoughts; use the type adaptive, or a budget of max_tokens - 1",
            field="thinking.budget_tokens",
        )
    return {"enable_thinking": thinking.type != "disabled"}


def _calls_tools(asked: MessagesBody) -> bool:
    choice = asked.tool_choice
    if choice is None:
        return bool(asked.tools)
    if choice.type in ("any", "tool"):
        text = (
            "not supported: only a grammar can make a model call a tool, and grammars cannot resume; use auto or none"
        )
        raise InvalidRequest(text, field="tool_choice.type")
    return choice.type == "auto" and bool(asked.tools)
