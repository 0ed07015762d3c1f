"""Speaks /v1/chat/completions."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from ebbtide.errors import InvalidRequest
from ebbtide.gateway.decode import ChoiceDelta, ChoiceFinish, ChoiceResult
from ebbtide.gateway.dialects.dialect import (
    AnswerContext,
    AskedText,
    Completions,
    Count,
    OpenAIAnswer,
    SharedBody,
    StreamOptions,
    chat_logprobs,
    parsed_inside,
    stream_options,
    token_name,
    version_spans,
)
from ebbtide.gateway.dialects.fields import (
    AGENT_TOOL_FIELDS,
    COMPLETIONS_EACH,
    EBBTIDE,
    LABELS,
    MODEL,
    NO_RESUME,
    NOT_RECORDED,
    PART_FIELDS,
    SAMPLING,
    STREAMED,
    TEXT_FORMAT,
    TEXT_ONLY,
    TOOL_FUNCTION_FIELDS,
    VLLM,
    RouteFields,
    ignored,
    neutral,
    refused,
    supported,
)
from ebbtide.gateway.parsers import ToolCallDelta
from ebbtide.gateway.request import ChatPrompt
from ebbtide.types.parse import parse
from ebbtide.types.tokens import TokenArray

CHAT_FIELDS: Final = RouteFields(
    route="/v1/chat/completions",
    rules={
        "model": MODEL,
        "messages": supported("text only; the model's own chat template renders them"),
        "max_tokens": supported("default: what the context leaves"),
        "max_completion_tokens": supported("as max_tokens"),
        "n": COMPLETIONS_EACH,
        "stream": STREAMED,
        "stream_options": supported("include_usage, continuous_usage_stats"),
        "logprobs": supported("the sampled token's, under the distribution that it was sampled from"),
        "top_logprobs": neutral(0, why=NOT_RECORDED),
        "tools": supported("functions; the gateway needs a tool parser for them"),
        "tool_choice": supported("auto or none; required and a named tool are refused, as grammars cannot resume"),
        "parallel_tool_calls": ignored("nothing limits the calls that a model writes"),
        "response_format": TEXT_FORMAT,
        "reasoning_effort": supported("handed to the chat template, with enable_thinking, as vLLM does"),
        "chat_template_kwargs": supported("handed to the chat template"),
        "chat_template": refused("only the model's own template is rendered"),
        "add_generation_prompt": supported("default true"),
        "add_special_tokens": supported("default false"),
        "continue_final_message": neutral(False, why="a message is always rendered complete"),
        "echo": neutral(False, why="answers hold what was generated"),
        "documents": neutral([], why="put them into messages"),
        "include_reasoning": supported("default true"),
        "return_prompt_text": neutral(False, why="ask for return_token_ids"),
        "functions": neutral([], why="they are an older form of tools"),
        "function_call": neutral("none", "auto", why="it is an older form of tool_choice"),
        "modalities": neutral(["text"], why=TEXT_ONLY),
        "audio": refused(TEXT_ONLY),
        "prediction": refused(NO_RESUME),
        "verbosity": neutral("medium", why="chat templates do not see it"),
        "web_search_options": refused("the gateway searches nothing"),
        "moderation": refused("the gateway judges nothing"),
        "store": neutral(False, why="answers are not kept for later calls"),
        "media_io_kwargs": neutral({}, why=TEXT_ONLY),
        "mm_processor_kwargs": neutral({}, why=TEXT_ONLY),
        **SAMPLING,
        **VLLM,
        **LABELS,
        **EBBTIDE,
    },
)
MESSAGE_FIELDS: Final = RouteFields(
    route="a message",
    rules={
        "role": supported("developer counts as system"),
        "content": supported("a string, or a list of parts of type text"),
        "name": supported("handed to the chat template"),
        "tool_calls": supported("of an assistant; arguments are a string"),
        "tool_call_id": supported("of a tool's answer"),
        "reasoning": supported("of an assistant"),
        "reasoning_content": supported("as reasoning"),
        "refusal": refused("the models have no such channel"),
        "audio": refused(TEXT_ONLY),
        "function_call": refused("it is an older form of tool_calls"),
        "annotations": neutral([], why="the models write none"),
        "provider_specific_fields": ignored("a client's own"),
        "parsed": ignored("a client's own: what the openai client read of the content"),
    },
)
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
        request = asked.request(
            [self._prompt(asked)],
            max_tokens=_max_tokens(asked),
            n=asked.n,
            parse_tools=calls_tools(asked.tool_choice, asked.tools),
            logprobs=asked.logprobs,
        )
        shape = replace(asked, messages=[], tools=[], chat_template_kwargs={})  # an answer outlives its prompt
        return AskedText(request, lambda context: ChatAnswer(shape, context, options))

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
            "not supported: only a grammar can make a model call a tool, and another worker could not continue such a "
            "completion exactly; use auto or none",
            field="tool_choice",
        )
    if choice == "auto" and not tools:
        raise InvalidRequest("auto needs tools; name some, or leave it out", field="tool_choice")
    return bool(choice == "auto")


def _max_tokens(asked: ChatBody) -> int | None:
    if None not in (asked.max_tokens, asked.max_completion_tokens) and asked.max_tokens != asked.max_completion_tokens:
        raise InvalidRequest("differs from max_completion_tokens; give one of them", field="max_tokens")
    return asked.max_completion_tokens or asked.max_tokens


_ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class _Function(Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1)]
    arguments: str = "{}"
    parsed_arguments: Any = None  # what the openai client read of them


class _ToolCall(Struct, forbid_unknown_fields=True):
    function: _Function
    id: str = ""
    type: str = "function"
    index: int = 0


class _Message(Struct, kw_only=True):
    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[_ToolCall] = msgspec.field(default_factory=list)
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _ToolFunction(Struct, kw_only=True):
    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


def read_messages(messages: Sequence[Any], *, field: str = "messages") -> list[dict[str, Any]]:
    """The messages as chat templates take them: content is one text.

    Raises `InvalidRequest` naming the message and its field.
    """
    if not messages:
        raise InvalidRequest("is empty; give a message", field=field)
    return [_read_message(message, f"{field}[{number}]") for number, message in enumerate(messages)]


def _read_message(message: Any, field: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequest("must be an object with role and content", field=field)
    asked = parsed_inside(_Message, MESSAGE_FIELDS.checked(message, inside=field), field)
    if asked.role not in _ROLES:
        raise InvalidRequest(f"must be one of {', '.join(_ROLES)}", field=f"{field}.role")
    made: dict[str, Any] = {"role": _ROLES[asked.role], "content": text_of(asked.content, f"{field}.content")}
    if asked.tool_calls:
        made["tool_calls"] = [_read_call(call, f"{field}.tool_calls") for call in asked.tool_calls]
    reasoning = asked.reasoning if asked.reasoning is not None else asked.reasoning_content
    further = {"name": asked.name, "tool_call_id": asked.tool_call_id, "reasoning": reasoning}
    return made | {name: value for name, value in further.items() if value is not None}


def text_of(content: str | list[dict[str, Any]] | None, field: str, *, kinds: Sequence[str] = ("text",)) -> str:
    """The text of a message's content; parts are joined by line breaks. Raises `InvalidRequest` for other parts."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for number, part in enumerate(content):
        place = f"{field}[{number}]"
        if part.get("type") not in kinds:
            raise InvalidRequest(
                f"{str(part.get('type'))[:40]!r} is not supported: requests are text only; send parts of type "
                f"{' or '.join(kinds)}",
                field=f"{place}.type",
            )
        if not isinstance(text := PART_FIELDS.checked(part, inside=place).get("text"), str):
            raise InvalidRequest("must be a string", field=f"{place}.text")
        texts.append(text)
    return "\n".join(texts)


def _read_call(call: _ToolCall, field: str) -> dict[str, Any]:
    if call.type != "function":
        raise InvalidRequest("only functions are called; set type to function", field=f"{field}.type")
    return tool_call(call.id, call.function.name, call.function.arguments)


def tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A tool call as it was answered. Its arguments are a text that a model wrote, JSON or not."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def read_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """The functions that a model may call, as chat templates take them. Raises `InvalidRequest` naming the tool."""
    made = []
    for number, tool in enumerate(tools):
        field = f"tools[{number}]"
        if not isinstance(tool, dict) or tool.get("type", "function") != "function":
            raise InvalidRequest("must be an object of type function", field=field)
        if unknown := set(tool) - {"type", "function", "defer_loading"}:
            raise InvalidRequest("unknown field of a tool; leave it out", field=f"{field}.{min(unknown)}")
        function = tool.get("function")
        made.append(tool_function(function if isinstance(function, dict) else {}, f"{field}.function"))
    return made


def tool_function(function: dict[str, Any], field: str) -> dict[str, Any]:
    """A function under the names of /v1/chat/completions, checked. Raises `InvalidRequest`."""
    asked = parsed_inside(_ToolFunction, TOOL_FUNCTION_FIELDS.checked(function, inside=field), field)
    made = {"name": asked.name, "description": asked.description, "parameters": asked.parameters}
    return {"type": "function", "function": {name: value for name, value in made.items() if value is not None}}


_RENAMED: Final = {"input_schema": "parameters"}


def read_agent_tools(
    tools: Sequence[Any], kinds: Sequence[str | None], *, inside: str = "tools"
) -> list[dict[str, Any]]:
    """The functions among tools of `kinds`, as chat templates take them. Raises `InvalidRequest` naming the tool."""
    return [read_agent_tool(tool, kinds, f"{inside}[{number}]") for number, tool in enumerate(tools)]


def read_agent_tool(tool: Any, kinds: Sequence[str | None], field: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise InvalidRequest("must be an object", field=field)
    if tool.get("type") not in kinds:
        raise InvalidRequest(
            f"{str(tool.get('type'))[:40]!r} is not supported: only functions that the client runs are tools here",
            field=f"{field}.type",
        )
    checked = AGENT_TOOL_FIELDS.checked(tool, inside=field)
    checked.pop("type", None)
    return tool_function({_RENAMED.get(name, name): value for name, value in checked.items()}, field)


class ChatAnswer(OpenAIAnswer):
    """The answer to one chat."""

    def __init__(self, asked: ChatBody, context: AnswerContext, options: StreamOptions) -> None:
        super().__init__(context, options)
        self._asked = asked
        self._name = token_name(context.token_text, as_ids=asked.return_tokens_as_token_ids)
        self._begun: set[int] = set()
        self._called: set[int] = set()

    def events(self, delta: ChoiceDelta) -> bytes:
        self._tally.add(delta.tokens)
        if delta.tool_calls:
            self._called.add(delta.index)
        choice = {"index": delta.index, "delta": self._message_delta(delta)}
        choice |= self._tail(delta.tokens, delta.finish, called=delta.index in self._called)
        prompt = {} if self._begun else self._prompt_ids()
        self._begun.add(delta.index)
        return self._event(choice, finished=delta.finish is not None, **prompt)

    def whole(self, results: Sequence[ChoiceResult]) -> dict[str, Any]:
        choices = []
        for result in results:
            tokens = result.tokens
            self._tally.add(tokens)
            choice = {"index": result.index, "message": self._message(result)}
            choice |= self._tail(tokens, result.finish, called=bool(result.calls))
            if self._asked.return_token_ids:
                choice["weight_versions"] = version_spans(tokens)
            choices.append(choice)
        whole = self._frame(choices) | {"object": "chat.completion", "usage": self._tally.usage()}
        return whole | self._tally.stamps() | self._prompt_ids()

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._context.played.prompt_of(0)} if self._asked.return_token_ids else {}

    def _frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self._context.request_id}",
            "object": "chat.completion.chunk",
            "created": self._context.created,
            "model": self._context.model,
            "choices": choices,
        }

    def _tail(self, tokens: TokenArray, finish: ChoiceFinish | None, *, called: bool) -> dict[str, Any]:
        """What chunks and whole choices have in common."""
        reason = finish.reason if finish else None
        tail: dict[str, Any] = {
            "logprobs": chat_logprobs(tokens, self._name) if self._asked.logprobs else None,
            "finish_reason": "tool_calls" if called and reason == "stop" else reason,
            "stop_reason": finish.stop if finish else None,
        }
        if self._asked.return_token_ids:
            tail["token_ids"] = tokens["id"].tolist()
        return tail

    def _message_delta(self, delta: ChoiceDelta) -> dict[str, Any]:
        message: dict[str, Any] = {} if delta.index in self._begun else {"role": "assistant", "content": ""}
        if delta.text:
            message["content"] = delta.text
        if delta.reasoning and self._asked.include_reasoning:
            message["reasoning"] = delta.reasoning
        if delta.tool_calls:
            message["tool_calls"] = [_call_delta(call) for call in delta.tool_calls]
        return message

    def _message(self, result: ChoiceResult) -> dict[str, Any]:
        calls = [tool_call(call["id"], call["name"], call["arguments"]) for call in result.calls]
        message: dict[str, Any] = {"role": "assistant", "content": result.text or (None if calls else "")}
        if result.reasoning and self._asked.include_reasoning:
            message["reasoning"] = result.reasoning
        return message | ({"tool_calls": calls} if calls else {})


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": call.arguments}
    if not call.call_id:
        return {"index": call.index, "function": function}
    return {"index": call.index, "id": call.call_id, "type": "function", "function": {"name": call.name} | function}
