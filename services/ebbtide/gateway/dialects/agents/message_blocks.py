"""Turns the messages of /v1/messages into those of a chat."""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from ebbtide.errors import InvalidRequest
from ebbtide.gateway.dialects.openai.chat_messages import text_of, tool_call
from ebbtide.gateway.fields.agent_fields import BLOCK_FIELDS

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
