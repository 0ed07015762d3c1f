"""Estimates the tokens of a request from its body, and learns from the engine's own counts.

An answer in one piece shows no tokens until its end, so the most that its request allows counts from the start. If the
body names no limit, the answer counts as nothing.

No function here raises for an invalid body: the engine refuses it.
"""

import re
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from ebbtide.serving_guard.proxy.sse_tokens import TokenUsage

#: Bytes of JSON text per token until the engine has reported a count: English, with JSON's overhead.
_BYTES_PER_TOKEN: Final = 4.0
#: Weight of a new observation: about ten of them determine the ratio.
_WEIGHT: Final = 0.1
_MODELS: Final = 64
#: Names come from clients and are kept; no served model has a longer name.
_LONGEST_NAME: Final = 256
#: Tokens that most models use for an image, whatever its bytes.
_IMAGE_TOKENS: Final = 1000
#: No engine holds more tokens for one request, whatever the body asks for.
_MOST_ANSWERED: Final = 1 << 22
#: msgspec has no optional `Raw`.
_NONE: Final = Raw(b"")
_IMAGE: Final = re.compile(rb'"data:[^",]{0,100};base64,[^"]*"')


class _Body(Struct):
    model: str = ""
    stream: bool | None = None
    prompt: Raw = _NONE
    messages: Raw = _NONE
    input: Raw = _NONE
    instructions: Raw = _NONE
    token_ids: Raw = _NONE
    tools: Raw = _NONE
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    n: Any = None


class _Answer(Struct):
    usage: TokenUsage | None = None


_decode_body: Final = msgspec.json.Decoder(_Body).decode
_decode_answer: Final = msgspec.json.Decoder(_Answer).decode


class PromptEstimate(Struct, frozen=True):
    """The estimate from one body."""

    model: str = ""
    streamed: bool = False
    tokens: int = 0  # of parts of the prompt whose tokens are countable
    text_bytes: int = 0  # of the other parts
    answer_tokens: int = 0  # of an answer in one piece, at most; 0: unknown


def read(body: bytes) -> PromptEstimate:
    """Estimate a complete body. If it is not a JSON object of this kind, its length counts."""
    try:
        seen = _decode_body(body)
    except (msgspec.MsgspecError, RecursionError):
        return PromptEstimate(text_bytes=len(body))
    tokens = text = 0
    for part in (seen.prompt, seen.messages, seen.input, seen.instructions, seen.token_ids, seen.tools):
        counted, length = _size(bytes(part))
        tokens, text = tokens + counted, text + length
    model = seen.model if len(seen.model) <= _LONGEST_NAME else ""
    return PromptEstimate(model, bool(seen.stream), tokens, text, 0 if seen.stream else _answer_tokens(seen))


def _answer_tokens(seen: _Body) -> int:
    asked = (seen.max_completion_tokens, seen.max_tokens, seen.max_output_tokens)
    most = next((one for one in asked if isinstance(one, int)), 0)
    answers = max(1, seen.n) if isinstance(seen.n, int) else 1
    return min(max(0, most) * answers, _MOST_ANSWERED)


def _size(part: bytes) -> tuple[int, int]:
    """(tokens, bytes of text). Lists of numbers, nested ones too, are tokens; an image is `_IMAGE_TOKENS`."""
    if part in {b"", b"null"}:
        return 0, 0
    opening = part[:64].replace(b" ", b"").replace(b"\n", b"").lstrip(b"[")
    if part[:1] == b"[" and opening[:1].isdigit():
        return part.count(b",") + 1, 0
    if b";base64," in part:
        part, images = _IMAGE.subn(b"", part)
        return images * _IMAGE_TOKENS, len(part)
    return 0, len(part)


def usage(body: bytes) -> TokenUsage | None:
    """The engine's token counts in a complete answer."""
    try:
        return _decode_answer(body).usage
    except (msgspec.MsgspecError, RecursionError):
        return None


class PromptEstimator:
    """Learns each model's bytes per token from `usage` in the engine's answers."""

    def __init__(self) -> None:
        self._ratios: dict[str, float] = {}

    def tokens(self, asked: PromptEstimate) -> int:
        """Of the prompt, and of an answer that comes in one piece."""
        return (
            asked.tokens
            + asked.answer_tokens
            + round(asked.text_bytes / self._ratios.get(asked.model, _BYTES_PER_TOKEN))
        )

    def learn(self, asked: PromptEstimate, prompt_tokens: int) -> None:
        """Learn from the engine's count. Prompts with counted parts show nothing about text."""
        if asked.tokens or not asked.text_bytes or prompt_tokens <= 0:
            return
        if asked.model not in self._ratios and len(self._ratios) >= _MODELS:
            return
        ratio = min(max(asked.text_bytes / prompt_tokens, 0.25), 64.0)
        old = self._ratios.get(asked.model, ratio)
        self._ratios[asked.model] = old + _WEIGHT * (ratio - old)
