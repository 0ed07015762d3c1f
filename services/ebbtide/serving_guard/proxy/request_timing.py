"""One request as its listener hears of it.

Invariant: `arrived` is followed by exactly one `ended`, and what a listener raises ends here.
"""

import itertools
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from ebbtide import telemetry
from ebbtide.serving_guard import metrics
from ebbtide.serving_guard.proxy import prompt_estimate
from ebbtide.serving_guard.proxy.prompt_estimate import PromptEstimate, PromptEstimator
from ebbtide.serving_guard.proxy.sse_tokens import SseTokenCounter
from ebbtide.serving_guard.traffic.traffic_events import TrafficListener

log = telemetry.get_logger(__name__)

#: An answer in one piece that is longer is not kept to read its `usage`.
_KEPT_ANSWER: Final = 256 << 10


class RequestListener:
    """A `TrafficListener` whose failures cost no request; the first of each kind is logged."""

    def __init__(self, traffic: TrafficListener) -> None:
        self.traffic = traffic
        self.estimator = PromptEstimator()
        self._told: set[str] = set()
        self._ids = itertools.count(1)

    def id(self) -> str:
        return str(next(self._ids))

    def call(self, what: Callable[..., Any], *values: object) -> Any:
        try:
            return what(*values)
        except Exception as error:  # noqa: BLE001 - whatever it is, the request goes on
            self.failed(what.__name__, error)
            return None

    def failed(self, what: str, error: BaseException) -> None:
        metrics.LISTENER_FAILURES.inc()
        if what not in self._told:
            self._told.add(what)
            log.error("a listener failed; traffic goes on, and this is said once", call=what, exc_info=error)


class TimedRequest:
    """An inference request from its arrival on."""

    def __init__(self, listener: RequestListener, asked: PromptEstimate) -> None:
        self.id = listener.id()
        self._listener, self._traffic, self._asked = listener, listener.traffic, asked
        self._events: SseTokenCounter | None = None
        self._answer: list[bytes] | None = None
        self._answer_bytes = 0
        self._status = 0
        self._over = False
        tokens = listener.estimator.tokens(asked)
        listener.call(self._traffic.arrived, self.id, asked.model, tokens, time.monotonic(), asked.streamed)

    def ready(self) -> Awaitable[None] | None:
        held = self._listener.call(self._traffic.ready, self.id)
        return held if isinstance(held, Awaitable) else None

    def hold_failed(self, error: BaseException) -> None:
        self._listener.failed("ready", error)

    def headed(self, status: int, kind: bytes, encoding: bytes) -> None:
        """The answer's head is here: its status, content type and content encoding."""
        self._status = status
        if encoding not in {b"", b"identity"}:
            return  # unreadable from here
        if kind.startswith(b"text/event-stream"):
            self._events = SseTokenCounter()
        elif kind.startswith(b"application/json"):
            self._answer = []

    def body(self, data: bytes) -> None:
        """Bytes of the answer, as they came."""
        if self._over:
            return
        if self._events is not None:
            if tokens := self._events.feed(data):
                self._listener.call(self._traffic.produced, self.id, tokens, time.monotonic())
        elif self._answer is not None:
            self._answer_bytes += len(data)
            if self._answer_bytes > _KEPT_ANSWER:
                self._answer = None
            else:
                self._answer.append(data)

    def end(self, *, whole: bool) -> None:
        """The answer has come to its end (`whole`), or never will."""
        if self._over:
            return
        self._over = True
        ok = whole and 200 <= self._status < 300 and not (self._events and self._events.failed)
        now = time.monotonic()
        if ok:
            self._learn()
            if self._events is None and not self._asked.streamed:  # else it would be taken for a first token
                self._listener.call(self._traffic.produced, self.id, 1, now)
        self._listener.call(self._traffic.ended, self.id, ok, now)

    def _learn(self) -> None:
        prompt = self._events.prompt_tokens if self._events else 0
        if self._answer and (usage := prompt_estimate.usage(b"".join(self._answer))) is not None:
            prompt = usage.prompt
        self._listener.estimator.learn(self._asked, prompt)
