"""Learns latencies without rollouts, and the delays by rollouts, from served requests and rollout steps.

Invariant: `beside` is the sum of rollout steps' durations. The overlap with a part of a request's life is the growth
of that sum meanwhile, and never more than that part. A step is reported shortly after its end, so the sum at a token
may lack the last part of a step.
"""

from math import inf, sqrt
from typing import Final

from ebbtide.scheduling.coserving.request_slack import ServedRequest
from ebbtide.scheduling.coserving.step_time import StepTime
from ebbtide.scheduling.coserving.unloaded_latency import UnloadedLatency

#: Decode steps are observed once in this many seconds.
_EVERY_S: Final = 0.005
#: The excess over the prediction is from about 64 first tokens, because single ones vary much.
_FADE: Final = 1.0 - 1.0 / 64
_SOME_S: Final = 0.2
_ERRORS: Final = 2.0
#: What sharing brings is unknown before it has been seen on so many tokens. By fewer it was found not to pay where it
#: does, and then it is hardly tried again.
_SHARED_TOKENS: Final = 128
_SHARED_FADE: Final = 1.0 - 1.0 / 512
#: What sharing brings is learnt anew once the served engine's tokens take this many times as long or as short: it was
#: seen under another speed, and where sharing ended because of it, little is seen that could correct it.
_OTHER_SPEED: Final = 1.25


class LatencyModel:
    """Teaches `unloaded` and `steps`."""

    def __init__(self, unloaded: UnloadedLatency, steps: StepTime) -> None:
        self._unloaded, self._steps = unloaded, steps
        self.beside = 0.0
        self._step_end = -inf  # when the last step ended, or until when a step may begin
        self._solo: ServedRequest | None = None  # came while nothing was inside, and nothing came since
        self._changed = -inf  # when a request came, had its first token or left
        self._observed_at = -inf  # when a decode step was last observed
        self._overlap = self._excess = 0.0  # of first tokens: time with rollouts, and time beyond the prediction
        self._squares = [0.0, 0.0, 0.0]  # sums of overlap squared, overlap times excess, excess squared
        self._shared = self._lost = 0.0  # the same for decode steps
        self._shared_tokens = 0  # that these are of
        self._shared_at = 0.0  # what a token took without rollouts when these began

    def stepped(self, now: float, tokens: int, seconds: float, *, beside: bool | None) -> None:
        """A rollout step ended. `beside`: whether served work went on during it; None: during a part of it, so its
        duration is not learnt."""
        self.beside += max(0.0, seconds)
        self._step_end = max(self._step_end, now)
        if beside is not None:
            self._steps.observe(tokens, seconds, beside=beside)

    def may_step(self, until: float) -> None:
        """A rollout step may begin before `until`."""
        self._step_end = max(self._step_end, until)

    def may_not_step(self, now: float) -> None:
        """No step begins from now on."""
        self._step_end = min(self._step_end, now)

    def arrived(self, now: float, prompt_tokens: int, *, alone: bool, streamed: bool = True) -> ServedRequest:
        self._changed = now
        request = ServedRequest(arrived=now, prompt_tokens=prompt_tokens, beside=self.beside, streamed=streamed)
        self._solo = request if alone and streamed else None
        return request

    def disturbed(self, now: float) -> None:
        """Requests of other governors came or left."""
        self._changed, self._solo = now, None

    def began(self, request: ServedRequest, target: float) -> None:
        """Its first token came."""
        self._changed = request.first
        ttft = request.first - request.arrived
        overlap = min(ttft, self.beside - request.beside)
        if request.streamed:
            request.note_miss(ttft, overlap, target)
        if request is not self._solo:
            return
        if overlap > 0.0:
            self._overlap = _FADE * self._overlap + overlap
            excess = ttft - self._unloaded.typical_prefill_s(request.prompt_tokens)
            self._excess = _FADE * self._excess + excess
            added = overlap * overlap, overlap * excess, excess * excess
            self._squares = [_FADE * before + more for before, more in zip(self._squares, added, strict=True)]
        if overlap < 0.5 * ttft:
            self._unloaded.began(request.prompt_tokens, ttft - overlap)

    def went_on(self, request: ServedRequest, since: float, batch: int, overlap: float) -> None:
        """Its next token came, and the one before it at `since`, while `batch` requests decoded and none waited;
        rollout steps ran for `overlap` in between."""
        if since <= self._changed or request.last <= self._observed_at + _EVERY_S:
            return
        self._observed_at = request.last
        pause = request.last - since
        if since > self._step_end:
            self._unloaded.decoded(batch, pause)
        elif overlap > 0.0:
            self._shared_at = self._shared_at or self._unloaded.usual_decode_s
            self._shared_tokens += 1
            self._shared = _SHARED_FADE * self._shared + min(pause, overlap)
            self._lost = _SHARED_FADE * self._lost + pause - min(pause, self._unloaded.typical_decode_s(batch))

    def ended(self, now: float, request: ServedRequest, target: float, *, ok: bool) -> None:
        self._changed = now
        behind, seconds = request.tokens - 1, request.last - request.first
        if ok and behind > 0 and seconds > 0.0:
            overlap = min(seconds, request.beside_last - request.beside_first)
            request.note_miss(seconds, overlap, target * behind)
            if request is self._solo and overlap == 0.0:
                self._unloaded.finished(behind, seconds)
        if request is self._solo:
            self._solo = None

    def forget_other_speeds(self) -> bool:
        """Learn anew what sharing brings, if it was learnt under another speed of the served engine. Returns whether it
        was."""
        then_s, now_s = self._shared_at, self._unloaded.usual_decode_s
        if not then_s or then_s / _OTHER_SPEED <= now_s <= then_s * _OTHER_SPEED:
            return False
        self._shared = self._lost = self._shared_at = 0.0
        self._shared_tokens = 0
        return True

    @property
    def gained(self) -> float | None:
        """The gain of sharing: rollouts' progress less the served work's delay, per second in which both ran. None:
        unknown. It is 0.0 if the two only take time from each other, and more if they fill each other's gaps."""
        if self._shared < _SOME_S or self._shared_tokens < _SHARED_TOKENS:
            return None
        return 1.0 / max(1.0, self._steps.beside_ratio) - self._lost / self._shared

    @property
    def contention(self) -> float:
        """How much longer a first token took per second of a rollout step beside it; 1.0 while unknown."""
        return self._excess / self._overlap if self._overlap >= _SOME_S else 1.0

    @property
    def contention_at_least(self) -> float:
        """The same less two standard errors. Where something else disturbs the machine, first tokens vary by more than
        a step beside them could do."""
        known, (overlaps, products, excesses) = self.contention, self._squares
        if self._overlap < _SOME_S:
            return known
        scatter = excesses - 2.0 * known * products + known * known * overlaps
        return known - _ERRORS * sqrt(max(0.0, scatter)) / self._overlap
