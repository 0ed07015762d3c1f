"""Checks the messages and tools of a chat, and brings them into the form that chat templates take."""

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from ebbtide.errors import InvalidRequest
from ebbtide.gateway.dialects.nested_errors import parsed_inside
from ebbtide.gateway.fields.openai_fields import MESSAGE_FIELDS, PART_FIELDS, TOOL_FUNCTION_FIELDS

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
