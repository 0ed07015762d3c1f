"""Digests histories of messages by what they mean, so that turns need not keep them.

Two messages have the same digest if a client that sends an answer back, unchanged but for its form, sends the same
message: empty fields, ids of calls, and the spelling of arguments in JSON make no difference. Any other field does.
"""

import json
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Final

from ebbtide.errors import InvalidRequest
from ebbtide.gateway.model import call_arguments, reasoning_of, template_messages, without_reasoning

_BYTES: Final = 16
#: The history before the first message.
NO_HISTORY: Final = bytes(_BYTES)


def message_digests(messages: list[dict[str, Any]]) -> list[bytes]:
    """Returns a digest of each message alone. Raises `InvalidRequest` naming `messages` for content that is no text."""
    try:
        return [_digest(json.dumps(_meaning(one), sort_keys=True).encode()) for one in template_messages(messages)]
    except RecursionError:
        raise InvalidRequest("are nested too deeply", field="messages") from None


def history_digests(digests: Sequence[bytes], *, after: bytes = NO_HISTORY) -> list[bytes]:
    """Returns for each message a digest of all messages up to it, from those of single messages."""
    found, last = [], after
    for one in digests:
        last = _digest(last + one)
        found.append(last)
    return found


def text_digest(text: bytes) -> bytes:
    """The digest of a text in UTF-8."""
    return _digest(text)


def prefix_digests(text: bytes, lengths: Sequence[int]) -> dict[int, bytes]:
    """Returns length -> digest of so many first bytes of `text`, for those of `lengths` that it has; in one pass."""
    found, state, at = {}, blake2b(digest_size=_BYTES), 0
    for length in sorted(set(lengths)):
        if length > len(text):
            break
        state.update(text[at:length])
        found[length], at = state.copy().digest(), length
    return found


def json_value(value: Any) -> Any:
    """Returns a JSON value with whole numbers as integers: JavaScript writes 1.0 as 1."""
    match value:
        case dict():
            return {key: json_value(one) for key, one in value.items()}
        case list():
            return [json_value(one) for one in value]
        case float() if value.is_integer():
            return int(value)
        case _:
            return value


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=_BYTES).digest()


def _meaning(message: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in message.items() if value not in (None, "", [], {})}
    if kept.get("role") != "assistant":
        return kept
    reasoning, kept = reasoning_of(kept), without_reasoning(kept)
    calls = [
        {"name": one["function"]["name"], "arguments": json_value(call_arguments(one["function"]["arguments"]))}
        for one in kept.pop("tool_calls", ())
    ]
    return kept | ({"reasoning": reasoning} if reasoning else {}) | ({"calls": calls} if calls else {})
