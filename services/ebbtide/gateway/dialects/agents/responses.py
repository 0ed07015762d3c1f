"""Speaks /v1/responses."""

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from ebbtide.errors import InvalidRequest
from ebbtide.gateway.dialects.agents.agent_tools import read_response_tools
from ebbtide.gateway.dialects.agents.response_answer import ResponseAnswer
from ebbtide.gateway.dialects.agents.response_input import response_messages
from ebbtide.gateway.dialects.dialect import AskedText
from ebbtide.gateway.dialects.openai.chat import Effort, calls_tools, check_count, template_options
from ebbtide.gateway.dialects.request_bodies import Count, Priority, SamplingBody, WeightVersionBody
from ebbtide.gateway.fields.agent_fields import RESPONSES_FIELDS
from ebbtide.gateway.generation.text_request import ChatPrompt, TextRequest
from ebbtide.types.parse import parse

_Include = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
_LOGPROBS: Final = "message.output_text.logprobs"


class _Reasoning(Struct, frozen=True, forbid_unknown_fields=True):
    effort: Effort | None = None
    summary: Any = None
    generate_summary: Any = None


class _Format(Struct, frozen=True, forbid_unknown_fields=True):
    type: str


class _TextConfig(Struct, frozen=True, forbid_unknown_fields=True):
    format: _Format | None = None
    verbosity: str | None = None


class ResponsesBody(SamplingBody, kw_only=True):
    input: str | list[Any]
    model: str = ""
    instructions: str = ""
    max_output_tokens: Count | None = None
    stream: bool = False
    tools: list[Any] = msgspec.field(default_factory=list)
    tool_choice: Any = None
    reasoning: _Reasoning = _Reasoning()
    text: _TextConfig = _TextConfig()
    include: list[_Include] = msgspec.field(default_factory=list)
    include_reasoning: bool = True
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    priority: Priority = 0
    request_id: str = ""
    session_id: str = ""
    weight_version: WeightVersionBody = WeightVersionBody()


class ResponsesDialect:
    """Reads and answers responses."""

    def __init__(self, *, max_items: int, max_tools: int) -> None:
        self._max_items, self._max_tools = max_items, max_tools

    def read(self, body: Mapping[str, Any]) -> AskedText:
        asked = parse(ResponsesBody, RESPONSES_FIELDS.checked(body))
        if asked.text.format is not None and asked.text.format.type != "text":
            raise InvalidRequest("not supported: grammars cannot resume; only text is", field="text.format.type")
        check_count(asked.tools, self._max_tools, field="tools")
        tools, namespaces = read_response_tools(asked.tools, most=self._max_tools)
        request = TextRequest(
            model=asked.model,
            prompts=[self._prompt(asked, tools)],
            sampling=asked.sampling(),
            max_tokens=asked.max_output_tokens,
            stop=asked.stops(),
            keep_stop=asked.include_stop_str_in_output,
            skip_special=asked.skip_special_tokens,
            parse_tools=calls_tools(asked.tool_choice, asked.tools) and bool(tools),
            logprobs=_LOGPROBS in asked.include,
            stream=asked.stream,
            priority=asked.priority,
            versions=asked.weight_version.wish(),
            request_id=asked.request_id,
            session_id=asked.session_id,
        )
        echoed = {
            "instructions": asked.instructions or None,
            "metadata": body.get("metadata") or {},
            "tools": asked.tools,
            "tool_choice": asked.tool_choice or "auto",
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "max_output_tokens": asked.max_output_tokens,
        }
        logprobs = _LOGPROBS in asked.include
        return AskedText(
            request,
            lambda context: ResponseAnswer(
                context, echoed=echoed, namespaces=namespaces, logprobs=logprobs, reasoning=asked.include_reasoning
            ),
        )

    def _prompt(self, asked: ResponsesBody, tools: list[dict[str, Any]]) -> ChatPrompt:
        if not isinstance(asked.input, str):
            check_count(asked.input, self._max_items, field="input")
        return ChatPrompt(
            messages=response_messages(asked.input, asked.instructions),
            tools=tools or None,
            template_options=template_options(asked.chat_template_kwargs, asked.reasoning.effort),
        )
