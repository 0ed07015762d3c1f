"""Writes server-sent events (WHATWG HTML, section 9.2)."""

from typing import Any, Final

import msgspec

_encoder: Final = msgspec.json.Encoder()
#: A comment, which every client ignores.
KEEP_ALIVE: Final = b": waiting\n\n"
DONE: Final = b"data: [DONE]\n\n"


def data_event(content: Any) -> bytes:
    """An event without a name. JSON has no line breaks, so one line is enough."""
    return b"data: " + _encoder.encode(content) + b"\n\n"


def named_event(name: str, content: Any) -> bytes:
    return b"event: " + name.encode() + b"\n" + data_event(content)
