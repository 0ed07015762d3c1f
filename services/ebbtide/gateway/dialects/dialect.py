"""What all dialects share: reading bodies, naming errors, and shaping tokens and events."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, Protocol, TypeVar

import msgspec
from msgspec import Meta, Struct

from ebbtide import errors
from ebbtide.errors import EbbtideError, InvalidRequest
from ebbtide.gateway.decode import ChoiceDelta, ChoiceResult
from ebbtide.gateway.dialects.fields import NO_RESUME, STREAM_OPTION_FIELDS
from ebbtide.gateway.request import Prompt, TextRequest, VersionWish
from ebbtide.gateway.request_player import PlayedRequest
from ebbtide.types.parse import parse
from ebbtide.types.run import MAX_STOP_LENGTH, MAX_STOPS, Sampling
from ebbtide.types.tokens import TokenArray


class AnswerContext(Struct, frozen=True, kw_only=True):
    """What an answer says about its request."""

    request_id: str
    created: int  # Unix time, s
    played: PlayedRequest
    token_text: Callable[[int], str]
    decode: Callable[[Sequence[int]], str]  # the text of several, special tokens included

    @property
    def model(self) -> str:
        """The run that serves the request."""
        return self.played.run_id


class Answer(Protocol):
    """Shapes the answer to one request: either `whole`, or `begin`, `events` for each delta, and `end`."""

    def begin(self) -> bytes: ...

    def events(self, delta: ChoiceDelta) -> bytes: ...

    def end(self) -> bytes: ...

    def failure(self, error: EbbtideError) -> bytes:
        """The event that tells of an error in the middle of a stream."""

    def idle(self) -> bytes:
        """What keeps the connection alive while there is nothing new."""

    def whole(self, results: Sequence[ChoiceResult]) -> Any:
        """An object for JSON."""


class AskedText(Struct, frozen=True):
    """A body as it was read."""

    request: TextRequest
    answer: Callable[[AnswerContext], Answer]


class Dialect(Protocol):
    """One route's shapes."""

    def read(self, body: Mapping[str, Any]) -> AskedText:
        """Raises `InvalidRequest` naming the field."""


TokenId = Annotated[int, Meta(ge=0, lt=1 << 32)]
Count = Annotated[int, Meta(ge=1, le=1 << 20)]
Completions = Annotated[int, Meta(ge=1, le=1 << 16)]
#: As the coordinator's field for it.
Priority = Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)]
#: Whether logprobs are answered, where a number asks for them.
LogprobCount = Annotated[int, Meta(ge=0, le=1)]


class SamplingBody(Struct, kw_only=True):
    """Fields of sampling, under the names of OpenAI and vLLM."""

    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] = 1.0
    min_tokens: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    stop: str | list[str] = msgspec.field(default_factory=list)
    stop_token_ids: list[TokenId] = msgspec.field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    seed: int | None = None

    def sampling(self, seed_field: str = "seed") -> Sampling:
        """Without stop strings and the bound on length, which the gateway sees to. Raises `InvalidRequest` naming
        `seed_field`, for a seed that would change something.
        """
        if self.seed is not None and self.temperature > 0:
            text = f"not supported: {NO_RESUME}; leave it out, or set temperature to 0"
            raise InvalidRequest(text, field=seed_field)
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(0, self.top_k),
            min_p=self.min_p,
            min_tokens=self.min_tokens,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            repetition_penalty=self.repetition_penalty,
        )

    def stops(self, field: str = "stop") -> tuple[str, ...]:
        """Raises `InvalidRequest` naming `field`."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if len(stops) > MAX_STOPS:
            raise InvalidRequest(f"at most {MAX_STOPS} strings", field=field)
        if any(not 1 <= len(stop) <= MAX_STOP_LENGTH for stop in stops):
            raise InvalidRequest(f"a stop string has 1 to {MAX_STOP_LENGTH} characters", field=field)
        return stops


class WeightVersionBody(Struct, frozen=True, forbid_unknown_fields=True):
    min_version: Annotated[int, Meta(ge=0, lt=1 << 32)] = 0
    exact_version: Annotated[int, Meta(ge=0, lt=1 << 32)] = 0

    def wish(self) -> VersionWish:
        if self.min_version and self.exact_version:
            raise InvalidRequest("give min_version or exact_version, not both", field="weight_version")
        return VersionWish(min_version=self.min_version, exact_version=self.exact_version)


class SharedBody(SamplingBody, kw_only=True):
    """What else all of vLLM's routes take."""

    model: str = ""
    stream: bool = False
    stream_options: dict[str, Any] = msgspec.field(default_factory=dict)
    priority: Priority = 0
    request_id: str = ""
    session_id: str = ""
    return_token_ids: bool = False
    weight_version: WeightVersionBody = WeightVersionBody()

    def request(self, prompts: Sequence[Prompt], **further: Any) -> TextRequest:
        """What is asked for. `further`: other fields of the request. Raises `InvalidRequest` naming the field."""
        return TextRequest(
            model=self.model,
            prompts=list(prompts),
            sampling=self.sampling(),
            stop=self.stops(),
            keep_stop=self.include_stop_str_in_output,
            skip_special=self.skip_special_tokens,
            stream=self.stream,
            priority=self.priority,
            versions=self.weight_version.wish(),
            request_id=self.request_id,
            session_id=self.session_id,
            **further,
        )


class StreamOptions(Struct, frozen=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False


def stream_options(body: Mapping[str, Any], *, stream: bool) -> StreamOptions:
    """Raises `InvalidRequest` naming the field."""
    if body and not stream:
        raise InvalidRequest("is for streams; set stream, or leave it out", field="stream_options")
    return parse(StreamOptions, STREAM_OPTION_FIELDS.checked(body, inside="stream_options"))


T = TypeVar("T")


def parsed_inside(kind: type[T], content: Mapping[str, Any], inside: str) -> T:
    """`parse`, for the object at the field `inside` of a body."""
    try:
        return parse(kind, content)
    except InvalidRequest as error:
        raise InvalidRequest(error.text, field=f"{inside}.{error.field}" if error.field else inside) from None


#: Exception -> status, subclasses included. The first that fits counts.
_STATUSES: Final[tuple[tuple[type[EbbtideError], int], ...]] = (
    (errors.InvalidRequest, 400),
    (errors.Unauthenticated, 401),
    (errors.PermissionDenied, 403),
    (errors.NotFound, 404),
    (errors.AlreadyExists, 409),
    (errors.VersionUnavailable, 409),
    (errors.NoCapacity, 429),
    (errors.NotReady, 503),
    (errors.Superseded, 503),
    (errors.Unavailable, 503),
)
ErrorShape = Callable[[int, EbbtideError, str], dict[str, Any]]
_OPENAI_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
#: As OpenAI's own service names a budget that is used up; clients do not try again.
_SPENT: Final = "insufficient_quota"
#: Other errors have their status as a number.
_OPENAI_CODES: Final[dict[type[EbbtideError], str]] = {
    errors.BudgetSpent: _SPENT,
    errors.RateLimited: "rate_limit_exceeded",
}
_ANTHROPIC_TYPES: Final = _OPENAI_TYPES | {
    409: "invalid_request_error",
    413: "request_too_large",
    503: "overloaded_error",
}
#: When a client that was told to come back may do so.
RETRY_AFTER_S: Final = 1.0


class BodyTooLarge(errors.InvalidRequest):
    """Send less."""


def status_of(error: EbbtideError) -> int:
    if isinstance(error, BodyTooLarge):
        return 413
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)


def retry_after_s(error: EbbtideError) -> float | None:
    """Seconds after which the same request may succeed; None: it will not."""
    if isinstance(error, errors.NoCapacity):
        return error.retry_after_s or None
    retryable = status_of(error) == 503 or isinstance(error, errors.VersionUnavailable)
    return RETRY_AFTER_S if retryable else None


def openai_error(status: int, error: EbbtideError, request_id: str) -> dict[str, Any]:
    """As `openai` clients read it."""
    field = error.field if isinstance(error, errors.InvalidRequest) else ""
    kind, code = _OPENAI_TYPES.get(status, "internal_error"), _OPENAI_CODES.get(type(error), status)
    if isinstance(error, errors.BudgetSpent):
        kind = _SPENT
    return {
        "error": {"message": str(error), "type": kind, "param": field or None, "code": code},
        "request_id": request_id,
    }


def anthropic_error(status: int, error: EbbtideError, request_id: str) -> dict[str, Any]:
    """As `anthropic` clients read it."""
    kind = _ANTHROPIC_TYPES.get(status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}, "request_id": request_id}


_encoder: Final = msgspec.json.Encoder()
#: A comment, which every client ignores.
KEEP_ALIVE: Final = b": waiting\n\n"
DONE: Final = b"data: [DONE]\n\n"


def data_event(content: Any) -> bytes:
    """An event without a name. JSON has no line breaks, so one line is enough."""
    return b"data: " + _encoder.encode(content) + b"\n\n"


def named_event(name: str, content: Any) -> bytes:
    return b"event: " + name.encode() + b"\n" + data_event(content)


class OpenAIAnswer:
    """What the answers of OpenAI's routes, and of those that follow them, have in common. It tallies their tokens."""

    def __init__(self, context: AnswerContext, options: StreamOptions) -> None:
        self._context, self._options = context, options
        self._tally = TokenTally(context.played.prompts)

    def begin(self) -> bytes:
        return b""

    def end(self) -> bytes:
        if not self._options.include_usage:
            return DONE
        return data_event(self._frame([]) | {"usage": self._tally.usage()}) + DONE

    def failure(self, error: EbbtideError) -> bytes:
        return data_event(openai_error(status_of(error), error, self._context.request_id)) + DONE

    def idle(self) -> bytes:
        return KEEP_ALIVE

    def _frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """What is around the choices of each event."""
        raise NotImplementedError

    def _event(self, choice: dict[str, Any], *, finished: bool, **further: Any) -> bytes:
        """One choice's event."""
        chunk = self._frame([choice]) | further
        if finished:
            chunk |= self._tally.stamps()
        if self._options.continuous_usage_stats:
            chunk["usage"] = self._tally.usage()
        return data_event(chunk)


#: JSON has no infinities. OpenAI's routes say this for a probability of zero.
_LEAST_LOGPROB: Final = -9999.0
TokenName = Callable[[int], str]


def token_name(token_text: TokenName, *, as_ids: bool) -> TokenName:
    """How logprobs name a token: by its text, or as token_id:N."""
    return (lambda token: f"token_id:{token}") if as_ids else token_text


def logprobs_of(tokens: TokenArray) -> list[float]:
    return [finite(value) for value in tokens["logprob"].tolist()]


def chat_logprobs(tokens: TokenArray, name: TokenName) -> dict[str, Any]:
    """As /v1/chat/completions has them."""
    pairs = zip(tokens["id"].tolist(), logprobs_of(tokens), strict=True)
    return {"content": [_chat_logprob(name(token), logprob) for token, logprob in pairs], "refusal": None}


def _chat_logprob(name: str, logprob: float) -> dict[str, Any]:
    return {"token": name, "logprob": logprob, "bytes": list(name.encode(errors="replace")), "top_logprobs": []}


def version_spans(tokens: TokenArray) -> list[dict[str, Any]]:
    """The contiguous spans [start, end) of tokens that one version sampled."""
    spans: list[dict[str, Any]] = []
    for place, version in enumerate(tokens["version"].tolist()):
        if spans and spans[-1]["version"] == str(version):
            spans[-1]["end"] = place + 1
        else:
            spans.append({"version": str(version), "start": place, "end": place + 1})
    return spans


class TokenTally:
    """Counts an answer's tokens, and notes the versions that sampled them."""

    def __init__(self, prompts: Sequence[Sequence[int]]) -> None:
        self.prompt_tokens = sum(map(len, prompts))
        self.completion_tokens = 0
        self._lowest = self._highest = 0

    def add(self, tokens: TokenArray) -> None:
        if not len(tokens):
            return
        self.completion_tokens += len(tokens)
        self.add_versions(int(tokens["version"].min()), int(tokens["version"].max()))

    def add_versions(self, lowest: int, highest: int) -> None:
        """Note versions that made a part of the answer."""
        self._lowest = min(self._lowest or lowest, lowest)
        self._highest = max(self._highest, highest)

    def usage(self) -> dict[str, int]:
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
        }

    def stamps(self) -> dict[str, int]:
        """The lowest and the highest version so far; nothing before the first token."""
        if not self._highest:
            return {}
        return {"weight_version_start": self._lowest, "weight_version_end": self._highest}


def finite(logprob: float) -> float:
    """A logprob that JSON can hold."""
    return _LEAST_LOGPROB if math.isnan(logprob) else max(logprob, _LEAST_LOGPROB)
