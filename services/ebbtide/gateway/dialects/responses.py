"""Speaks /v1/responses."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
import numpy as np
from msgspec import Struct

from ebbtide.errors import EbbtideError, InvalidRequest
from ebbtide.gateway.decode import ChoiceDelta, ChoiceFinish, ChoiceResult
from ebbtide.gateway.dialects.chat import (
    Effort,
    calls_tools,
    check_count,
    read_agent_tool,
    read_agent_tools,
    template_options,
    text_of,
    tool_call,
)
from ebbtide.gateway.dialects.dialect import (
    KEEP_ALIVE,
    AnswerContext,
    AskedText,
    Count,
    SharedBody,
    TokenTally,
    chat_logprobs,
    named_event,
    openai_error,
    status_of,
)
from ebbtide.gateway.dialects.fields import (
    EBBTIDE,
    LABELS,
    MODEL,
    NOT_RECORDED,
    SAMPLING,
    TEXT_ONLY,
    TOOL_CHOICE,
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
from ebbtide.types.tokens import TOKEN, TokenArray

_NOT_KEPT: Final = "answers are not kept for later calls; send the whole conversation"


RESPONSES_FIELDS: Final = RouteFields(
    route="/v1/responses",
    rules={
        "model": MODEL,
        "input": supported("a string, or items: messages, function calls, their outputs, and reasoning; text only"),
        "instructions": supported("a system message before the input"),
        "max_output_tokens": supported("default: what the context leaves"),
        "stream": supported("server-sent events"),
        "stream_options": neutral(
            {"include_obfuscation": False}, {"include_obfuscation": True}, why="nothing is padded"
        ),
        "tools": supported("functions, and namespaces of them; the gateway needs a tool parser for them"),
        "tool_choice": TOOL_CHOICE,
        "parallel_tool_calls": ignored("nothing limits the calls that a model writes"),
        "reasoning": supported("effort is handed to the chat template; summary: none is written"),
        "text": supported("an object whose format is of type text"),
        "include": supported("message.output_text.logprobs; reasoning.encrypted_content, though reasoning is in clear"),
        "store": ignored("answers are not kept; the answer says so"),
        "client_metadata": ignored("a label"),
        "max_tool_calls": ignored("it bounds tools that a server runs, and there are none"),
        "previous_response_id": refused(_NOT_KEPT),
        "previous_input_messages": refused(_NOT_KEPT),
        "conversation": refused(_NOT_KEPT),
        "background": neutral(False, why=_NOT_KEPT),
        "prompt": refused("templates of prompts are not kept here"),
        "context_management": refused("a conversation is never cut: it is taken complete, or refused"),
        "truncation": neutral("disabled", why="a prompt is never truncated: it is taken complete, or refused"),
        "top_logprobs": neutral(0, why=NOT_RECORDED),
        "enable_response_messages": neutral(False, why=_NOT_KEPT),
        "include_reasoning": supported("default true"),
        "chat_template_kwargs": supported("handed to the chat template"),
        "image": refused(TEXT_ONLY),
        "moderation": refused("the gateway judges nothing"),
        "access_programs": refused("there are none"),
        "media_io_kwargs": neutral({}, why=TEXT_ONLY),
        "mm_processor_kwargs": neutral({}, why=TEXT_ONLY),
        **SAMPLING,
        **{name: VLLM[name] for name in ("priority", "request_id", "session_id", "cache_salt", "vllm_xargs")},
        **{name: VLLM[name] for name in ("mm_payload", "return_mm_kwargs", "kv_transfer_params", "ec_transfer_params")},
        **LABELS,
        **EBBTIDE,
    },
)


#: The fields of a namespace on /v1/responses.
NAMESPACE_FIELDS: Final = RouteFields(
    route="a namespace of tools",
    rules={
        "type": supported("namespace, on /v1/responses"),
        "name": supported("1 to 128 characters; an answer's calls of its functions have it"),
        "description": ignored("chat templates take functions alone"),
        "tools": supported(
            "functions; models call them by their own names, so one whose name another function of the request has is "
            "refused"
        ),
    },
)


#: The fields of an item of a response's input. Which of them an item needs follows from its type.
ITEM_FIELDS: Final = RouteFields(
    route="an input item",
    rules={
        "type": supported("message, reasoning, function_call or function_call_output"),
        "role": supported("of a message; developer counts as system"),
        "content": supported("of a message: a string, or parts of text; of reasoning: parts of type reasoning_text"),
        "call_id": supported("of a call and of its output"),
        "name": supported("of a call"),
        "arguments": supported("of a call: a string"),
        "output": supported("of a call: a string, or parts of text"),
        "id": ignored("a label"),
        "status": ignored("a label"),
        "phase": ignored("a label"),
        "summary": ignored("of reasoning; its content counts"),
        "encrypted_content": refused("nothing is encrypted here; send the content of reasoning"),
        "namespace": ignored("of a call: models call functions by their own names"),
        "caller": refused("no code runs here"),
    },
)


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


class ResponsesBody(SharedBody, kw_only=True):
    input: str | list[Any]
    instructions: str = ""
    max_output_tokens: Count | None = None
    tools: list[Any] = msgspec.field(default_factory=list)
    tool_choice: Any = None
    reasoning: _Reasoning = _Reasoning()
    text: _TextConfig = _TextConfig()
    include: list[_Include] = msgspec.field(default_factory=list)
    include_reasoning: bool = True
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)


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
        logprobs = _LOGPROBS in asked.include
        request = asked.request(
            [self._prompt(asked, tools)],
            max_tokens=asked.max_output_tokens,
            parse_tools=calls_tools(asked.tool_choice, asked.tools) and bool(tools),
            logprobs=logprobs,
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


_TEXTS: Final = ("input_text", "output_text", "text", "refusal")
_ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def response_messages(given: str | Sequence[Any], instructions: str) -> list[dict[str, Any]]:
    """Reasoning, text and calls that follow one another are one message of the assistant.

    Raises `InvalidRequest` naming the item.
    """
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not given:
        raise InvalidRequest("is empty; give a text or an item", field="input")
    for number, item in enumerate(given):
        field = f"input[{number}]"
        if not isinstance(item, dict):
            raise InvalidRequest("must be an object", field=field)
        _add(messages, ITEM_FIELDS.checked(item, inside=field), field)
    return messages


def _add(messages: list[dict[str, Any]], item: dict[str, Any], field: str) -> None:
    match item.get("type", "message"):
        case "message":
            _add_message(messages, item, field)
        case "reasoning":
            _assistant(messages)["reasoning"] = _reasoning(item, field)
        case "function_call":
            name, arguments = _text(item, "name", field), _text(item, "arguments", field)
            call = tool_call(_text(item, "call_id", field), name, arguments)
            _assistant(messages).setdefault("tool_calls", []).append(call)
        case "function_call_output":
            output = text_of(_content(item, "output", field), f"{field}.output", kinds=_TEXTS)
            messages.append({"role": "tool", "tool_call_id": _text(item, "call_id", field), "content": output})
        case kind:
            raise InvalidRequest(
                f"{str(kind)[:40]!r} is not supported; send messages, function calls, their outputs, or reasoning",
                field=f"{field}.type",
            )


def _add_message(messages: list[dict[str, Any]], item: dict[str, Any], field: str) -> None:
    role = _ROLES.get(str(item.get("role")))
    if role is None:
        raise InvalidRequest(f"must be one of {', '.join(_ROLES)}", field=f"{field}.role")
    content = text_of(_content(item, "content", field), f"{field}.content", kinds=_TEXTS)
    if role == "assistant" and not (message := _assistant(messages))["content"] and "tool_calls" not in message:
        message["content"] = content
    else:
        messages.append({"role": role, "content": content})


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The last message, if it is the assistant's; else a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _reasoning(item: dict[str, Any], field: str) -> str:
    content = _content(item, "content", field)
    return text_of(content, f"{field}.content", kinds=("reasoning_text",)) if content else ""


def _content(item: dict[str, Any], name: str, field: str) -> str | list[dict[str, Any]] | None:
    value = item.get(name)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        return value
    raise InvalidRequest("must be a string, or a list of objects", field=f"{field}.{name}")


def _text(item: dict[str, Any], name: str, field: str) -> str:
    value = item.get(name)
    if not isinstance(value, str) or not value:
        raise InvalidRequest("must be a string that is not empty", field=f"{field}.{name}")
    return value


#: A search in a provider's cache, which Codex offers by default. That is not here, and no model is told of it.
_CACHED_SEARCH: Final = {"type": "web_search", "external_web_access": False}

#: Most characters of a namespace's name.
_NAME_CHARACTERS: Final = 128


def read_response_tools(tools: Sequence[Any], *, most: int) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The functions of /v1/responses, and by their names the namespaces of those that have one.

    A namespace is a list of functions: models call them by their own names, and an answer says which namespace each is
    of. Raises `InvalidRequest` naming the tool, and before it reads any for more than `most`.
    """
    if (count := sum(len(_inner(tool)) if _is_namespace(tool) else 1 for tool in tools)) > most:
        raise InvalidRequest(f"has {count} functions; this gateway takes at most {most}", field="tools")
    made, namespaces = list[dict[str, Any]](), dict[str, str]()
    for number, tool in enumerate(tools):
        field = f"tools[{number}]"
        if tool == _CACHED_SEARCH and tool["external_web_access"] is False:  # 0 is no bool, and equals it
            continue
        if not _is_namespace(tool):
            made.append(read_agent_tool(tool, ("function",), field))
            continue
        name = _namespace_name(NAMESPACE_FIELDS.checked(tool, inside=field), field)
        functions = read_agent_tools(_inner(tool), ("function",), inside=f"{field}.tools")
        namespaces |= {one["function"]["name"]: name for one in functions}
        made += functions
    names = Counter(one["function"]["name"] for one in made)
    if twice := next((one for one in namespaces if names[one] > 1), None):
        raise InvalidRequest(f"{twice[:100]!r} is the name of several functions; models call them by it", field="tools")
    return made, namespaces


def _is_namespace(tool: Any) -> bool:
    return isinstance(tool, dict) and tool.get("type") == "namespace"


def _inner(namespace: dict[str, Any]) -> list[Any]:
    """Its list of functions, or none if it has no such list."""
    tools = namespace.get("tools")
    return tools if isinstance(tools, list) else []


def _namespace_name(checked: dict[str, Any], field: str) -> str:
    """Its name, which each event of a call repeats."""
    name = checked.get("name")
    if not isinstance(name, str) or not 1 <= len(name) <= _NAME_CHARACTERS:
        raise InvalidRequest(f"must be a string of 1 to {_NAME_CHARACTERS} characters", field=f"{field}.name")
    if not isinstance(checked.get("tools"), list):
        raise InvalidRequest("must be a list of functions", field=f"{field}.tools")
    return name


Event = dict[str, Any]


class ResponseItems:
    """One item is open at a time: reasoning, a message, or a function call. `output` has those that are closed."""

    def __init__(self, request_id: str, namespaces: Mapping[str, str]) -> None:
        """`namespaces`: of functions, by their names."""
        self._request_id, self._namespaces = request_id, namespaces
        self.output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._call = -1  # the index of the open function call
        self._parts: list[str] = []
        self._logprobs: list[Any] = []

    @property
    def writes_text(self) -> bool:
        """Whether the open item is a message."""
        return self._open is not None and self._open["type"] == "message"

    def reasoning(self, text: str) -> list[Event]:
        events = self._enter("reasoning", "rs")
        self._parts.append(text)
        return [*events, self._event("reasoning_text.delta", content_index=0, delta=text)]

    def text(self, text: str, logprobs: list[Any]) -> list[Event]:
        events = self._enter("message", "msg")
        self._parts.append(text)
        self._logprobs += logprobs
        return [*events, self._event("output_text.delta", content_index=0, delta=text, logprobs=logprobs)]

    def call(self, part: ToolCallDelta) -> list[Event]:
        events = self._enter_call(part)
        if part.arguments:
            self._parts.append(part.arguments)
            events.append(self._event("function_call_arguments.delta", delta=part.arguments))
        return events

    def close(self) -> list[Event]:
        """Close the open item."""
        item, text = self._open, "".join(self._parts)
        if item is None:
            return []
        events = []
        if item["type"] == "function_call":
            item["arguments"] = text
            events.append(self._event("function_call_arguments.done", arguments=text))
        else:
            part = self._part(text)
            kind = "output_text" if item["type"] == "message" else "reasoning_text"
            logprobs = {"logprobs": self._logprobs} if item["type"] == "message" else {}
            events.append(self._event(f"{kind}.done", content_index=0, text=text, **logprobs))
            events.append(self._event("content_part.done", content_index=0, part=part))
            item["content"] = [part]
        item["status"] = "completed"
        done = {"type": "response.output_item.done", "output_index": len(self.output), "item": item}
        self.output.append(item)
        self._open, self._call, self._parts, self._logprobs = None, -1, [], []
        return [*events, done]

    def _enter(self, kind: str, prefix: str) -> list[Event]:
        if self._open is not None and self._open["type"] == kind:
            return []
        events = self.close()
        further: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
        events.append(self._begin({"id": self._id(prefix), "type": kind, "content": [], **further}))
        return [*events, self._event("content_part.added", content_index=0, part=self._part(""))]

    def _enter_call(self, part: ToolCallDelta) -> list[Event]:
        if part.index == self._call:
            return []
        events = self.close()
        self._call = part.index
        call_id = part.call_id or self._id("call")
        item = {"id": self._id("fc"), "type": "function_call", "call_id": call_id, "name": part.name, "arguments": ""}
        if part.name in self._namespaces:
            item["namespace"] = self._namespaces[part.name]
        return [*events, self._begin(item)]

    def _begin(self, item: dict[str, Any]) -> Event:
        item["status"] = "in_progress"
        self._open = item
        return {"type": "response.output_item.added", "output_index": len(self.output), "item": dict(item)}

    def _part(self, text: str) -> dict[str, Any]:
        if self._open is not None and self._open["type"] == "message":
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}
        return {"type": "reasoning_text", "text": text}

    def _event(self, kind: str, **further: Any) -> Event:
        item_id = self._open["id"] if self._open is not None else ""
        return {"type": f"response.{kind}", "item_id": item_id, "output_index": len(self.output), **further}

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._request_id}_{len(self.output)}"


class ResponseAnswer:
    """The answer to one request. It has one completion."""

    def __init__(
        self,
        context: AnswerContext,
        *,
        echoed: dict[str, Any],
        namespaces: Mapping[str, str],
        logprobs: bool,
        reasoning: bool,
    ) -> None:
        """`echoed`: fields of the request that the answer repeats; `namespaces`: of functions, by their names."""
        self._context, self._echoed = context, echoed
        self._logprobs, self._reasoning = logprobs, reasoning
        self._items = ResponseItems(context.request_id, namespaces)
        self._tally = TokenTally(context.played.prompts)
        self._finish: ChoiceFinish | None = None
        self._sequence = 0
        self._unnamed: list[TokenArray] = []  # tokens of a stream that came without text

    def begin(self) -> bytes:
        begun = self._response("in_progress")
        return self._lines([{"type": f"response.{kind}", "response": begun} for kind in ("created", "in_progress")])

    def events(self, delta: ChoiceDelta) -> bytes:
        self._tally.add(delta.tokens)
        self._finish = delta.finish or self._finish
        events: list[Event] = []
        if delta.reasoning and self._reasoning:
            events += self._items.reasoning(delta.reasoning)
        self._unnamed.append(delta.tokens)
        if delta.text:
            events += self._items.text(delta.text, self._named_since())
        for part in delta.tool_calls:
            events += self._items.call(part)
        return self._lines(events)

    def end(self) -> bytes:
        events: list[Event] = []
        if self._logprobs and self._items.writes_text and (rest := self._named_since()):
            events += self._items.text("", rest)
        events += self._items.close()
        status = self._status()
        return self._lines([*events, {"type": f"response.{status}", "response": self._response(status)}])

    def failure(self, error: EbbtideError) -> bytes:
        told = openai_error(status_of(error), error, self._context.request_id)["error"]
        failed = self._response("failed") | {"error": {"code": "server_error", "message": told["message"]}}
        event = {"type": "error", "code": str(told["code"]), "message": told["message"], "param": told["param"]}
        return self._lines([{"type": "response.failed", "response": failed}, event])

    def idle(self) -> bytes:
        return KEEP_ALIVE

    def whole(self, results: Sequence[ChoiceResult]) -> dict[str, Any]:
        (result,) = results
        tokens = result.tokens
        self._tally.add(tokens)
        self._finish = result.finish
        if result.reasoning and self._reasoning:
            self._items.reasoning(result.reasoning)
        if result.text or not result.calls:
            self._items.text(result.text, self._named(tokens))
        for index, call in enumerate(result.calls):
            part = ToolCallDelta(index=index, call_id=call["id"], name=call["name"], arguments=call["arguments"])
            self._items.call(part)
        self._items.close()
        return self._response(self._status())

    def _named(self, tokens: TokenArray) -> list[Any]:
        if not self._logprobs:
            return []
        found: list[Any] = chat_logprobs(tokens, self._context.token_text)["content"]
        return found

    def _named_since(self) -> list[Any]:
        """Logprobs of the tokens since the last text: of half a character, say, or of what a stop string may begin."""
        tokens, self._unnamed = np.concatenate(self._unnamed) if self._unnamed else np.empty(0, TOKEN), []
        return self._named(tokens)

    def _status(self) -> str:
        return "incomplete" if self._finish and self._finish.reason == "length" else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        usage = self._tally.usage()
        ended = status in ("completed", "incomplete")
        return {
            "id": f"resp_{self._context.request_id}",
            "object": "response",
            "created_at": self._context.created,
            "model": self._context.model,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": list(self._items.output),
            "parallel_tool_calls": True,
            "store": False,
            "truncation": "disabled",
            "text": {"format": {"type": "text"}},
            **self._echoed,
            "usage": _usage(usage) if ended else None,
            **(self._tally.stamps() if ended else {}),
        }

    def _lines(self, events: Sequence[Event]) -> bytes:
        lines = []
        for event in events:
            lines.append(named_event(event["type"], event | {"sequence_number": self._sequence}))
            self._sequence += 1
        return b"".join(lines)


def _usage(usage: dict[str, int]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
