"""Speaks Anthropic's /v1/messages."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from ebbtide.errors import EbbtideError, InvalidRequest
from ebbtide.gateway.decode import ChoiceDelta, ChoiceFinish, ChoiceResult
from ebbtide.gateway.dialects.chat import Effort, check_count, read_agent_tools, template_options, text_of, tool_call
from ebbtide.gateway.dialects.dialect import (
    AnswerContext,
    AskedText,
    Count,
    Priority,
    SamplingBody,
    TokenTally,
    WeightVersionBody,
    anthropic_error,
    named_event,
    status_of,
)
from ebbtide.gateway.dialects.fields import (
    EBBTIDE,
    MODEL,
    SAMPLING,
    TOOL_CHOICE,
    VLLM,
    RouteFields,
    ignored,
    neutral,
    refused,
    supported,
)
from ebbtide.gateway.parsers import ToolCallDelta
from ebbtide.gateway.request import ChatPrompt, TextRequest
from ebbtide.types.parse import parse

#: What Claude Code asks for, and what is done anyway.
_KEEPS_THOUGHTS: Final = {"type": "clear_thinking_20251015", "keep": "all"}


MESSAGES_FIELDS: Final = RouteFields(
    route="/v1/messages",
    rules={
        "model": MODEL,
        "messages": supported("blocks of type text, thinking, tool_use and tool_result"),
        "system": supported("a string, or blocks of type text"),
        "max_tokens": supported(
            "required; what the context leaves counts if it is less, and an answer cut by it ends by max_tokens"
        ),
        "stream": supported("server-sent events"),
        "stop_sequences": supported("the gateway finds them in the text and cancels the rest"),
        "temperature": SAMPLING["temperature"],
        "top_p": SAMPLING["top_p"],
        "top_k": SAMPLING["top_k"],
        "tools": supported("functions of the client; the gateway needs a tool parser for them"),
        "tool_choice": TOOL_CHOICE,
        "thinking": supported("for the chat template; a budget below max_tokens cannot be held"),
        "output_config": supported("effort, for the chat template"),
        "metadata": ignored("a label"),
        "user_profile_id": ignored("a label"),
        "workspace_id": ignored("a label"),
        "diagnostics": ignored("nothing is diagnosed"),
        "cache_control": ignored("prefix caches need no marks"),
        "service_tier": neutral("auto", "standard_only", why="there is one tier"),
        "speed": neutral("standard", why="there is one speed"),
        "inference_geo": refused("requests do not choose where workers are"),
        "container": refused("no code runs here"),
        "mcp_servers": neutral([], why="the gateway calls no tools"),
        "context_management": neutral(
            {"edits": []},
            {"edits": [_KEEPS_THOUGHTS]},
            why="a conversation is never cut: it is taken complete, or refused",
        ),
        "chat_template_kwargs": supported("handed to the chat template"),
        "watermarking": SAMPLING["watermarking"],
        "mm_payload": VLLM["mm_payload"],
        "return_mm_kwargs": VLLM["return_mm_kwargs"],
        "cache_salt": VLLM["cache_salt"],
        "kv_transfer_params": VLLM["kv_transfer_params"],
        "ec_transfer_params": VLLM["ec_transfer_params"],
        "vllm_xargs": VLLM["vllm_xargs"],
        "priority": VLLM["priority"],
        **EBBTIDE,
    },
)


#: The fields of a block of a message's content. Which of them a block needs follows from its type.
BLOCK_FIELDS: Final = RouteFields(
    route="a content block",
    rules={
        "type": supported("text, thinking, tool_use or tool_result"),
        "text": supported(),
        "thinking": supported(),
        "id": supported("of tool_use"),
        "name": supported("of tool_use"),
        "input": supported("of tool_use: an object"),
        "tool_use_id": supported("of tool_result"),
        "content": supported("of tool_result: a string, or blocks of type text"),
        "is_error": ignored("chat templates know no such mark; the result's text has to say it"),
        "signature": ignored("thoughts are not signed"),
        "cache_control": ignored("prefix caches need no marks"),
        "citations": neutral([], why="the models write none"),
        "caller": refused("no code runs here"),
    },
)


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


_KINDS: Final = ("text", "thinking", "tool_use", "tool_result")
_ROLES: Final = ("user", "assistant", "system")


def block_messages(messages: Sequence[Any], system: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Results of tools become messages of their own, before the text beside them.

    Raises `InvalidRequest` naming the block.
    """
    made: list[dict[str, Any]] = []
    if system:
        made.append({"role": "system", "content": text_of(system, "system")})
    if not messages:
        raise InvalidRequest("is empty; give a message", field="messages")
    for number, message in enumerate(messages):
        field = f"messages[{number}]"
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise InvalidRequest(f"must be an object whose role is one of {', '.join(_ROLES)}", field=field)
        if unknown := set(message) - {"role", "content"}:
            raise InvalidRequest("unknown field of a message; leave it out", field=f"{field}.{min(unknown)}")
        made += _read_blocks(message["role"], _blocks(message.get("content"), f"{field}.content"), field)
    return made


def _blocks(content: Any, field: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise InvalidRequest("must be a string, or a list of blocks", field=field)
    return content


def _read_blocks(role: str, blocks: list[dict[str, Any]], field: str) -> list[dict[str, Any]]:
    texts, thoughts, calls, results = list[str](), list[str](), list[dict[str, Any]](), list[dict[str, Any]]()
    for number, given in enumerate(blocks):
        place = f"{field}.content[{number}]"
        block = BLOCK_FIELDS.checked(given, inside=place) if given.get("type") in _KINDS else given
        match (role, block.get("type")):
            case (_, "text"):
                texts.append(_string(block, "text", place))
            case ("assistant", "thinking"):
                thoughts.append(_string(block, "thinking", place))
            case ("assistant", "tool_use"):
                calls.append(_call(block, place))
            case ("user", "tool_result"):
                results.append(_result(block, place))
            case (_, kind):
                raise InvalidRequest(
                    f"{str(kind)[:40]!r} is not supported here: requests are text and tools only", field=f"{place}.type"
                )
    if results and not texts:
        return results
    message: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
    if thoughts:
        message["reasoning"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [*results, message]


def _call(block: dict[str, Any], field: str) -> dict[str, Any]:
    given = block.get("input")
    if not isinstance(given, dict):
        raise InvalidRequest("must be an object", field=f"{field}.input")
    arguments = msgspec.json.encode(given).decode()
    return tool_call(_string(block, "id", field), _string(block, "name", field), arguments)


def _result(block: dict[str, Any], field: str) -> dict[str, Any]:
    """Whether the tool failed is for its text to say: chat templates know no such mark."""
    content = block.get("content")
    if content is not None and not isinstance(content, str):
        content = _blocks(content, f"{field}.content")
    text = text_of(content, f"{field}.content")
    return {"role": "tool", "tool_call_id": _string(block, "tool_use_id", field), "content": text}


def _string(block: dict[str, Any], name: str, field: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidRequest("must be a string", field=f"{field}.{name}")
    return value


class MessageAnswer:
    """The answer to one request. It has one completion, and one block of it is open at a time."""

    def __init__(self, context: AnswerContext) -> None:
        self._context = context
        self._tally = TokenTally(context.played.prompts)
        self._finish: ChoiceFinish | None = None
        self._index = -1  # of the last block
        self._open = ""  # the kind of the open block; a tool call's has its index
        self._called = False

    def begin(self) -> bytes:
        message = self._message([]) | {"stop_reason": None, "stop_sequence": None}
        return named_event("message_start", {"type": "message_start", "message": message})

    def events(self, delta: ChoiceDelta) -> bytes:
        self._tally.add(delta.tokens)
        self._finish = delta.finish or self._finish
        lines = []
        if delta.reasoning:
            lines.append(self._enter("thinking", {"type": "thinking", "thinking": "", "signature": ""}))
            lines.append(self._delta({"type": "thinking_delta", "thinking": delta.reasoning}))
        if delta.text:
            lines.append(self._enter("text", {"type": "text", "text": ""}))
            lines.append(self._delta({"type": "text_delta", "text": delta.text}))
        for part in delta.tool_calls:
            lines.append(self._enter(f"tool_use {part.index}", self._tool_block(part)))
            if part.arguments:
                lines.append(self._delta({"type": "input_json_delta", "partial_json": part.arguments}))
        return b"".join(lines)

    def end(self) -> bytes:
        reason = {"stop_reason": self._reason(), "stop_sequence": self._stop_sequence()}
        usage = {"output_tokens": self._tally.completion_tokens, "input_tokens": self._tally.prompt_tokens}
        last = {"type": "message_delta", "delta": reason, "usage": usage} | self._tally.stamps()
        return (
            self._close() + named_event("message_delta", last) + named_event("message_stop", {"type": "message_stop"})
        )

    def failure(self, error: EbbtideError) -> bytes:
        return named_event("error", anthropic_error(status_of(error), error, self._context.request_id))

    def idle(self) -> bytes:
        return named_event("ping", {"type": "ping"})

    def whole(self, results: Sequence[ChoiceResult]) -> dict[str, Any]:
        (result,) = results
        self._tally.add(result.tokens)
        self._finish, self._called = result.finish, bool(result.calls)
        blocks: list[dict[str, Any]] = []
        if result.reasoning:
            blocks.append({"type": "thinking", "thinking": result.reasoning, "signature": ""})
        if result.text or not result.calls:
            blocks.append({"type": "text", "text": result.text})
        blocks += [
            {"type": "tool_use", "id": call["id"], "name": call["name"], "input": _input(call["arguments"])}
            for call in result.calls
        ]
        ended = {"stop_reason": self._reason(), "stop_sequence": self._stop_sequence()}
        return self._message(blocks) | ended | self._tally.stamps()

    def _message(self, blocks: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"msg_{self._context.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._context.model,
            "content": blocks,
            "usage": {"input_tokens": self._tally.prompt_tokens, "output_tokens": self._tally.completion_tokens},
        }

    def _tool_block(self, part: ToolCallDelta) -> dict[str, Any]:
        self._called = True
        call_id = part.call_id or f"toolu_{self._context.request_id}_{part.index}"
        return {"type": "tool_use", "id": call_id, "name": part.name, "input": {}}

    def _enter(self, kind: str, block: dict[str, Any]) -> bytes:
        if self._open == kind:
            return b""
        closed = self._close()
        self._open = kind
        self._index += 1
        begun = {"type": "content_block_start", "index": self._index, "content_block": block}
        return closed + named_event("content_block_start", begun)

    def _close(self) -> bytes:
        if not self._open:
            return b""
        self._open = ""
        return named_event("content_block_stop", {"type": "content_block_stop", "index": self._index})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        event = {"type": "content_block_delta", "index": self._index, "delta": delta}
        return named_event("content_block_delta", event)

    def _reason(self) -> str:
        if self._finish is not None and self._finish.reason == "length":
            return "max_tokens"  # also where the context cut it: clients do not know the reason for that alone
        if self._stop_sequence() is not None:
            return "stop_sequence"
        return "tool_use" if self._called else "end_turn"

    def _stop_sequence(self) -> str | None:
        stop = self._finish.stop if self._finish else None
        return stop if isinstance(stop, str) else None


def _input(arguments: str) -> dict[str, Any]:
    """The arguments as an object. What a model wrote that is none stays readable."""
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return {"malformed_arguments": arguments}
