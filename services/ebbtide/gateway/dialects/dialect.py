"""Says what each route's dialect does: it reads bodies, and shapes answers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct

from ebbtide.errors import EbbtideError
from ebbtide.gateway.generation.choice_delta import ChoiceDelta, ChoiceResult
from ebbtide.gateway.generation.played_request import PlayedRequest
from ebbtide.gateway.generation.text_request import TextRequest


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
