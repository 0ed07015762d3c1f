"""Records served requests after the fact: their number, latency and load, and whether they met the SLO. It decides
nothing: the governor does.

Invariant: a request is in `_open` from its arrival to its end; sums only grow. Models with an SLO of their own are
counted separately, all others together (""), so memory does not grow with the names that clients send. All of it is
lost with the process.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from msgspec import Struct

from ebbtide.serving_guard import metrics
from ebbtide.serving_guard.borrowers import percentiles
from ebbtide.serving_guard.governor.budget_decider import LearntCosts
from ebbtide.types.grants import UNKNOWN, Latency

#: Requests that percentiles rest on.
_WINDOW: Final = 1024
_MINUTE_S: Final = 60


class _Request(Struct):
    model: str
    prompt: int
    arrived: float
    streamed: bool
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0


class _Latencies(Struct):
    """TTFT or TPOT of one model's requests."""

    model: str
    kind: str
    window: deque[float]  # of recent requests
    judged: int = 0
    within: int = 0

    def add(self, seconds: float, target: float) -> None:
        histogram = metrics.TTFT_SECONDS if self.kind == "ttft" else metrics.TPOT_SECONDS
        histogram.labels(self.model).observe(seconds)
        self.window.append(seconds)
        if target > 0:
            self.judged += 1
            self.within += seconds <= target
            metrics.ATTAINED.labels(self.model, self.kind, "within" if seconds <= target else "beyond").inc()

    def latency(self, target: float, unloaded: float) -> Latency:
        p50, p95, p99 = percentiles(self.window)
        attained = self.within / self.judged if self.judged else UNKNOWN
        return Latency(p50=p50, p95=p95, p99=p99, target=target, attained=attained, unloaded=unloaded)


class SloStats:
    """Counts requests from `now` on, in seconds of the monotonic clock. `models`: those with an SLO of their own."""

    def __init__(self, now: float, models: Iterable[str] = ()) -> None:
        self.began = now
        self.requests = self.failed = 0
        self.tokens_inside = 0  # of prompts and answers so far, of all requests inside
        self.waiting = 0
        self._open: dict[str, _Request] = {}
        self._seen = 0  # requests inside, in mode observe
        self._latencies = {
            model: (_Latencies(model, "ttft", deque(maxlen=_WINDOW)), _Latencies(model, "tpot", deque(maxlen=_WINDOW)))
            for model in {"": None, **dict.fromkeys(models)}
        }
        self._busy: deque[tuple[int, float]] = deque()  # a second, and the part of it with a request inside
        self._busy_since: float | None = None

    @property
    def models(self) -> Sequence[str]:
        """The models that are counted separately; "": all others."""
        return tuple(self._latencies)

    @property
    def inside(self) -> int:
        return len(self._open) or self._seen

    def arrived(self, request: str, model: str, prompt_tokens: int, now: float, *, streamed: bool) -> None:
        self._open[request] = _Request(model, prompt_tokens, now, streamed)
        self.tokens_inside += prompt_tokens
        self.waiting += 1
        self._advance(now)

    def model(self, request: str) -> str:
        return self._open[request].model if request in self._open else ""

    def produced(self, request: str, tokens: int, now: float) -> None:
        if (one := self._open.get(request)) is None:
            return
        if not one.tokens:
            one.first = now
            self.waiting -= 1
        one.tokens += tokens
        one.last = now
        self.tokens_inside += tokens

    def ended(self, request: str, learnt: LearntCosts, now: float, *, ok: bool) -> None:
        if (one := self._open.pop(request, None)) is None:
            return
        self.waiting -= not one.tokens
        self.tokens_inside -= one.prompt + one.tokens
        self._count(ok=ok)
        ttft, tpot = self._of(one.model)
        if one.tokens:  # a request that failed after its first token was served until then
            ttft.add(one.first - one.arrived, learnt.ttft_target_s)
        if one.tokens > 1:
            tpot.add((one.last - one.first) / (one.tokens - 1), learnt.tpot_target_s)
        self._advance(now)

    def observed(self, inside: int, waiting: int, now: float) -> None:
        """Mode observe: this many requests are inside, and wait, now."""
        self._seen, self.waiting = inside, waiting
        self._advance(now)

    def served(self, kind: str, seconds: Sequence[float], target: float) -> None:
        """Mode observe: add latencies of requests; nothing else is known of these requests."""
        latencies = self._of("")[kind == "tpot"]
        for one in seconds:
            latencies.add(one, target)

    def finished(self, count: int, failed: int = 0) -> None:
        """Mode observe: count requests that ended."""
        for number in range(count):
            self._count(ok=number >= failed)

    def latencies(self, learnt: LearntCosts, model: str = "") -> tuple[Latency, Latency]:
        """TTFT and TPOT of the model's requests, or of all models without an SLO of their own; `learnt` is of the
        same."""
        ttft, tpot = self._of(model)
        return (
            ttft.latency(learnt.ttft_target_s, learnt.unloaded_ttft_s),
            tpot.latency(learnt.tpot_target_s, learnt.unloaded_tpot_s),
        )

    def _of(self, model: str) -> tuple[_Latencies, _Latencies]:
        return self._latencies.get(model) or self._latencies[""]

    def load(self, now: float) -> float:
        """Share of the last minute, or of the time since the start, with a request inside."""
        self._advance(now)
        span = min(float(_MINUTE_S), now - self.began)
        return min(1.0, sum(share for _, share in self._busy) / span) if span > 0 else 0.0

    def _count(self, *, ok: bool) -> None:
        self.requests += 1
        self.failed += not ok
        metrics.REQUESTS.labels("ok" if ok else "failed").inc()

    def _advance(self, now: float) -> None:
        """Count the time until now, second by second."""
        since = self._busy_since
        self._busy_since = now if self.inside else None
        metrics.INSIDE.set(self.inside)
        while self._busy and self._busy[0][0] < now - _MINUTE_S:
            self._busy.popleft()
        if since is None:
            return
        since = max(since, now - _MINUTE_S)
        while since < now:
            second = int(since)
            until = min(now, second + 1.0)
            held = self._busy.pop()[1] if self._busy and self._busy[-1][0] == second else 0.0
            self._busy.append((second, held + until - since))
            since = until
