"""Reports the events of one request to its listener.

Invariant: `arrived` is followed by exactly one `ended`, and exceptions of a listener are caught here.
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
        if self._answer and (usage := prompt_estimate.usage(bytes(self._answer))) is not None:
            prompt = usage.prompt
        self._listener.estimator.learn(self._asked, prompt)
