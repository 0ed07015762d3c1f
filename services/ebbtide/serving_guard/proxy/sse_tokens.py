"""Counts tokens in a streamed answer from its bytes as they arrive.

Invariant: if the engine sends `usage` with each event, the count never exceeds it. Nothing here raises: an event that
cannot be read counts as one token.
"""

from typing import Final

import msgspec
from msgspec import Raw, Struct

#: A longer event is not kept until its end: events with tokens are shorter.
_LONGEST: Final = 256 << 10
#: msgspec has no optional `Raw`.
_NONE: Final = Raw(b"null")
_EMPTY: Final = frozenset({b"null", b'""', b"[]"})


class TokenUsage(Struct):
    """The engine's token counts, by the names of completions and chat, or of responses and messages."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None

    @property
    def prompt(self) -> int:
        return self.prompt_tokens or self.input_tokens or 0

    @property
    def made(self) -> int | None:
        return self.completion_tokens if self.completion_tokens is not None else self.output_tokens


class _Delta(Struct):
    role: str | None = None
    content: Raw = _NONE
    reasoning: Raw = _NONE
    reasoning_content: Raw = _NONE
    tool_calls: Raw = _NONE

    def opens(self) -> bool:
        """Whether it holds only the role, as chat's first event does."""
        parts = (self.content, self.reasoning, self.reasoning_content, self.tool_calls)
        return self.role is not None and all(bytes(part) in _EMPTY for part in parts)


class _Choice(Struct):
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    def tokens(self) -> int:
        if self.delta is not None and self.finish_reason is None and self.delta.opens():
            return 0
        return len(self.token_ids) if self.token_ids else 1


class _Inner(Struct):
    usage: TokenUsage | None = None


class _Event(Struct):
    type: str = ""
    choices: list[_Choice] | None = None
    usage: TokenUsage | None = None
    response: _Inner | None = None
    message: _Inner | None = None
    error: Raw = _NONE


_decode: Final = msgspec.json.Decoder(_Event).decode


class SseTokenCounter:
    """One streamed answer."""

    def __init__(self) -> None:
        self._tail = b""  # the event that has not ended
        self._overlong = False  # whether that event was counted and dropped, as it is too long
        self._counted = 0
        self.failed = False  # whether the answer held an error
        self.prompt_tokens = 0  # from `usage`; 0: there was none yet

    def feed(self, body: bytes) -> int:
        """Count the tokens of the events that end in `body`, which may begin and end anywhere."""
        data = self._tail + body if self._tail else body
        if b"\r\n" in data:
            data = data.replace(b"\r\n", b"\n")
        events = data.split(b"\n\n")
        self._tail = events.pop()
        tokens = 0
        for event in events:
            if self._overlong:
                self._overlong = False
                continue
            tokens += self._tokens(event)
        if len(self._tail) > _LONGEST:
            self._tail = self._tail[-1:]  # it may be the first half of the event's end
            tokens, self._overlong = tokens + (not self._overlong), True
        return tokens

    def _tokens(self, event: bytes) -> int:
        payload = _payload(event)
        if not payload or payload == b"[DONE]":
            return 0
        try:
            seen = _decode(payload)
        except (msgspec.MsgspecError, RecursionError):
            tokens = 1
        else:
            tokens = self._of(seen)
        self._counted += tokens
        return tokens

    def _of(self, seen: _Event) -> int:
        if seen.type == "error" or seen.type.endswith(".failed") or bytes(seen.error) not in _EMPTY:
            self.failed = True
            return 0
        if seen.choices is not None:
            tokens = sum([choice.tokens() for choice in seen.choices])
        elif seen.type:
            tokens = int(seen.type.endswith((".delta", "_delta")) and seen.type != "message_delta")
        else:
            tokens = int(seen.usage is None)
        inner = seen.response or seen.message
        usage = seen.usage or (inner.usage if inner else None)
        if usage is None:
            return tokens
        self.prompt_tokens = usage.prompt or self.prompt_tokens
        if not usage.made:
            return tokens
        return max(0, usage.made - self._counted)


def _payload(event: bytes) -> bytes:
    if event.startswith(b"data:") and b"\n" not in event:
        return event[5:].strip()
    lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)
