"""Turns the input items of /v1/responses into the messages of a chat."""

from collections.abc import Sequence
from typing import Any, Final

from ebbtide.errors import InvalidRequest
from ebbtide.gateway.dialects.openai.chat_messages import text_of, tool_call
from ebbtide.gateway.fields.agent_fields import ITEM_FIELDS

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
