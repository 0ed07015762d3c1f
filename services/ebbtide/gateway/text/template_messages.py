"""Brings the messages of requests into the form that chat templates are written for."""

import json
from typing import Any, Final

from ebbtide.errors import InvalidRequest

#: Text parts of one message, joined as vLLM's server joins them.
_BETWEEN_PARTS: Final = "\n"
#: What clients and templates call the reasoning of an answer: some know one name, some the other.
_REASONING: Final = ("reasoning", "reasoning_content")


def template_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns them with content as one text, reasoning under both its names, and arguments of calls as objects.

    Raises `InvalidRequest` naming `messages` for content that is no text.
    """
    return [_message(one, f"messages[{number}]") for number, one in enumerate(messages)]


def _message(message: dict[str, Any], field: str) -> dict[str, Any]:
    made = {key: value for key, value in message.items() if value is not None or key == "content"}
    if "content" in made or made.get("role") != "assistant":
        made["content"] = _content(made.get("content"), field)
    if (reasoning := reasoning_of(made)) is not None:
        made |= dict.fromkeys(_REASONING, reasoning)
    if "tool_calls" in made:
        calls = made.pop("tool_calls")
        if not isinstance(calls, list):
            raise InvalidRequest("must be a list of tool calls", field=f"{field}.tool_calls")
        if calls:  # templates take an empty list for calls
            made["tool_calls"] = [_call(one, f"{field}.tool_calls[{index}]") for index, one in enumerate(calls)]
    return made


def reasoning_of(message: dict[str, Any]) -> Any:
    """Returns a message's reasoning under either of its names, or None."""
    return next((message[name] for name in _REASONING if message.get(name) is not None), None)


def without_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Returns the message as clients send it back that keep no reasoning."""
    return {key: value for key, value in message.items() if key not in _REASONING}


def _content(content: Any, field: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest("must be a text or a list of parts", field=f"{field}.content")
    return _BETWEEN_PARTS.join(_part(one, f"{field}.content[{index}]") for index, one in enumerate(content))


def _part(part: Any, field: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise InvalidRequest("only parts of type text are supported", field=field)


def _call(call: Any, field: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest("must be a call of a named function", field=field)
    return {**call, "function": {**function, "arguments": call_arguments(function.get("arguments"))}}


def call_arguments(arguments: Any) -> Any:
    """Returns arguments of a call as the JSON value that they are. Text that is no JSON stays text: the model wrote it.

    None and the empty text are no arguments: `{}`.
    """
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
