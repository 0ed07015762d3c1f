"""How long a prompt is, estimated from the request's body, and what the engine says about it later.

Of an answer in one piece nothing is heard until its end, so what it may become counts from the start: the tokens that
the body asks for at most. Where it asks for none of a number, nothing is known of them.

Nothing here raises for a body that is odd: the engine is who refuses it.
"""

import re
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from ebbtide.serving_guard.proxy.sse_tokens import TokenUsage

#: Bytes of JSON text for a token, before the engine has said what they are: English, with what JSON adds to it.
_BYTES_PER_TOKEN: Final = 4.0
#: Of each new observation, so that some ten of them say it.
_WEIGHT: Final = 0.1
_MODELS: Final = 64
#: Names come from clients and are kept; no served model has a longer one.
_LONGEST_NAME: Final = 256
#: What an image is to most models, whatever its bytes.
_IMAGE_TOKENS: Final = 1000
#: No engine holds more for one request, whatever is asked for.
_MOST_ANSWERED: Final = 1 << 22
#: msgspec knows no optional `Raw`.
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
    """What a body asks for. `tokens` are counted ones, beside `text_bytes` of what is not."""

    model: str = ""
    streamed: bool = False
    tokens: int = 0
    text_bytes: int = 0
    answer_tokens: int = 0  # of an answer in one piece, at most; 0: not known


def read(body: bytes) -> PromptEstimate:
    """Of a whole body. One that is no JSON object of this kind counts by its length."""
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
    """(tokens, bytes of text). Lists of numbers, of lists too, are tokens; an image is as many as most have."""
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
    """What a whole answer says it took."""
    try:
        return _decode_answer(body).usage
    except (msgspec.MsgspecError, RecursionError):
        return None


class PromptEstimator:
    """Bytes per token of each model, learnt from `usage` where the engine tells it."""

    def __init__(self) -> None:
        self._ratios: dict[str, float] = {}

    def tokens(self, asked: PromptEstimate) -> int:
        """Of the prompt, and of an answer of which no token will be heard."""
        return (
            asked.tokens
            + asked.answer_tokens
            + round(asked.text_bytes / self._ratios.get(asked.model, _BYTES_PER_TOKEN))
        )

    def learn(self, asked: PromptEstimate, prompt_tokens: int) -> None:
        """The engine counted so many. Prompts of numbers, or with counted parts, say nothing about text."""
        if asked.tokens or not asked.text_bytes or prompt_tokens <= 0:
            return
        if asked.model not in self._ratios and len(self._ratios) >= _MODELS:
            return
        ratio = min(max(asked.text_bytes / prompt_tokens, 0.25), 64.0)
        old = self._ratios.get(asked.model, ratio)
        self._ratios[asked.model] = old + _WEIGHT * (ratio - old)
