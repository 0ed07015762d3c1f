"""Times inference requests: estimates their prompts, counts their tokens as they pass, and reports both to a listener.

No prompt, text or header leaves the proxy. Nothing here raises for an invalid body or answer: the engine refuses the
one, and an event that cannot be read counts as one token.

Invariant: for every request that `arrived`, exactly one `ended` follows, after all of its `produced`, whether the
request is answered, refused by the engine, cancelled by the client or fails. Exceptions of a listener are caught here.
"""

import itertools
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

import msgspec
from msgspec import Raw, Struct

from ebbtide import telemetry
from ebbtide.serving_guard import metrics

log = telemetry.get_logger(__name__)


class TrafficListener(Protocol):
    """Receives events of inference requests. Times are seconds of `time.monotonic()`.

    All calls come from the event loop's thread. An exception is logged once per kind of event, and does not affect the
    request.
    """

    def arrived(self, request: str, model: str, prompt_tokens: int, now: float, streamed: bool) -> None:
        """A request is complete (or too long to keep) and about to be forwarded.

        `request` is unique in this process, `model` is from the body ("" if it names none), `prompt_tokens` is an
        estimate. Without `streamed` the answer comes in one piece: its one `produced` is not the time of a first token,
        and `prompt_tokens` includes the most tokens that the body asks for.
        """

    def ready(self, request: str) -> Awaitable[None] | None:
        """Forward the request at once (None), or once the result is done. A plain or an `async` method.

        The proxy waits for `ProxySettings.max_hold_s` at most, and no longer than its client.
        """

    def produced(self, request: str, tokens: int, now: float) -> None:
        """The engine sent `tokens`, 1 or more; the first call is for the first token.

        Each streamed event counts as one token, unless the engine's `usage` says otherwise: then the last call brings
        the rest. An answer in one piece counts as one token, but as nothing if its request was said to be streamed (as
        with embeddings), because it does not show the time of a first token.
        """

    def ended(self, request: str, ok: bool, now: float) -> None:
        """The engine is done with the request. Not `ok`: an error status, an error in the stream, or incomplete."""


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
    """Counts the tokens of one streamed answer from its bytes as they arrive. If the engine sends `usage` with each
    event, the count never exceeds it."""

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
_ABSENT: Final = Raw(b"")
_IMAGE: Final = re.compile(rb'"data:[^",]{0,100};base64,[^"]*"')


class _Body(Struct):
    model: str = ""
    stream: bool | None = None
    prompt: Raw = _ABSENT
    messages: Raw = _ABSENT
    input: Raw = _ABSENT
    instructions: Raw = _ABSENT
    token_ids: Raw = _ABSENT
    tools: Raw = _ABSENT
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


def estimate_prompt(body: bytes) -> PromptEstimate:
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


def usage_of(body: bytes) -> TokenUsage | None:
    """The engine's token counts in a complete answer."""
    try:
        return _decode_answer(body).usage
    except (msgspec.MsgspecError, RecursionError):
        return None


class PromptEstimator:
    """Estimates the tokens of a request from its body, and learns each model's bytes per token from `usage` in the
    engine's answers.

    An answer in one piece shows no tokens until its end, so the most that its request allows counts from the start. If
    the body names no limit, the answer counts as nothing.
    """

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


#: A longer answer in one piece is not kept to read its `usage`.
_KEPT_ANSWER: Final = 256 << 10
#: Nor is one that comes while others of this size together are kept.
_KEPT_ANSWERS: Final = 16 << 20


class RequestListener:
    """Calls a `TrafficListener`, and logs the first failure of each kind."""

    def __init__(self, traffic: TrafficListener) -> None:
        self.traffic = traffic
        self.estimator = PromptEstimator()
        self.ids = itertools.count(1)
        self.kept_bytes = 0  # of all answers that are kept now
        self._logged: set[str] = set()

    def call(self, what: Callable[..., Any], *values: object) -> Any:
        try:
            return what(*values)
        except Exception as error:  # noqa: BLE001 - the request goes on whatever fails
            self.failed(what.__name__, error)
            return None

    def failed(self, what: str, error: BaseException) -> None:
        metrics.LISTENER_FAILURES.inc()
        if what not in self._logged:
            self._logged.add(what)
            log.error("a listener failed; traffic goes on, and this is logged once", call=what, exc_info=error)


class TimedRequest:
    """One inference request, from its arrival on."""

    def __init__(self, listener: RequestListener, asked: PromptEstimate) -> None:
        self.id = str(next(listener.ids))
        self._listener, self._traffic, self._asked = listener, listener.traffic, asked
        self._events: SseTokenCounter | None = None
        self._answer: bytearray | None = None
        self._status = 0
        self._over = False
        tokens = listener.estimator.tokens(asked)
        listener.call(self._traffic.arrived, self.id, asked.model, tokens, time.monotonic(), asked.streamed)

    def ready(self) -> Awaitable[None] | None:
        held = self._listener.call(self._traffic.ready, self.id)
        return held if isinstance(held, Awaitable) else None

    def headed(self, status: int, kind: bytes, encoding: bytes) -> None:
        """The answer's head is here: its status, content type and content encoding."""
        self._status = status
        if encoding not in {b"", b"identity"}:
            return  # it is compressed
        if kind.startswith(b"text/event-stream"):
            self._events = SseTokenCounter()
        elif kind.startswith(b"application/json"):
            self._answer = bytearray()

    def body(self, data: bytes) -> None:
        """Read bytes of the answer as they arrive."""
        if self._over:
            return
        if self._events is not None:
            if tokens := self._events.feed(data):
                self._listener.call(self._traffic.produced, self.id, tokens, time.monotonic())
        elif self._answer is not None:
            self._answer += data
            self._listener.kept_bytes += len(data)
            if len(self._answer) > _KEPT_ANSWER or self._listener.kept_bytes > _KEPT_ANSWERS:
                self._release()

    def end(self, *, whole: bool) -> None:
        """The answer is complete (`whole`), or never will be."""
        if self._over:
            return
        self._over = True
        ok = whole and 200 <= self._status < 300 and not (self._events and self._events.failed)
        now = time.monotonic()
        if ok:
            self._learn()
            if self._events is None and not self._asked.streamed:  # otherwise it would count as a first token
                self._listener.call(self._traffic.produced, self.id, 1, now)
        self._release()
        self._listener.call(self._traffic.ended, self.id, ok, now)

    def _release(self) -> None:
        self._listener.kept_bytes -= len(self._answer or b"")
        self._answer = None

    def _learn(self) -> None:
        prompt = self._events.prompt_tokens if self._events else 0
        if self._answer and (usage := usage_of(bytes(self._answer))) is not None:
            prompt = usage.prompt
        self._listener.estimator.learn(self._asked, prompt)
