"""Follows the served requests inside: until when rollouts may go on beside them, and what their latencies teach.

The slack is how long rollouts may delay requests before one misses its aim. It follows ROSE's test (see `governor`),
with two differences. The queue counts: prefill is serial, so a request also waits for the work ahead of it. The next
token of a request that decodes has two deadlines, and the earlier one holds. One bounds the pause since its last token.
The other keeps the request's mean within the aim, so that a request which was already slowed down is not slowed
further.
"""

from math import inf, sqrt
from typing import Final

from msgspec import Struct

from ebbtide.serving_guard.governor.costs import RecentValues, StepTime, UnloadedLatency


class ServedRequest(Struct):
    """One served request inside. Times are in seconds; `beside` times are sums of rollout steps' durations."""

    arrived: float
    prompt_tokens: int
    beside: float = 0.0  # the sum when it arrived
    first: float = 0.0  # when its first token came
    last: float = 0.0  # when its last token came
    tokens: int = 0
    beside_first: float = 0.0  # the sum at its first token
    beside_last: float = 0.0  # the sum at its last token
    missed: bool = False  # it missed a target that it would have met without rollouts
    streamed: bool = True

    def note_miss(self, seconds: float, overlap: float, target: float) -> None:
        """Set `missed` if these seconds exceed the target, and would not without the overlap with rollouts."""
        self.missed |= seconds - overlap <= target < seconds

    def own_tpot_s(self, granted_s: float) -> float:
        """Mean seconds of a later token without rollouts; 0.0 if there is none. Rollouts were granted `granted_s` of
        each. A longer overlap counts as the request's own time: the next one may be as long."""
        behind = self.tokens - 1
        if behind < 1:
            return 0.0
        overlap = self.beside_last - self.beside_first
        return (self.last - self.first - min(overlap, granted_s * behind)) / behind


class SlackBook:
    """Keeps the requests inside, and computes until when rollouts may go on beside them.

    Invariant: a request is in `_waiting`, in order of arrival, until its first token, and from then on in `_decoding`
    and `_due` until its end. `_due` holds the deadline of each request's next token for the aims `_due_for`.
    """

    def __init__(self, unloaded: UnloadedLatency) -> None:
        self._unloaded = unloaded
        self._waiting: dict[str, ServedRequest] = {}
        self._decoding: dict[str, ServedRequest] = {}
        self._due: dict[str, float] = {}
        self._due_for = (0.0, 0.0)
        self._earliest: float | None = None  # least arrival time less the work up to the first token, of `_waiting`

    def __len__(self) -> int:
        return len(self._waiting) + len(self._decoding)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def decoding(self) -> int:
        return len(self._decoding)

    def arrive(self, name: str, request: ServedRequest) -> None:
        self._waiting[name] = request
        self._earliest = None

    def last(self, name: str) -> float | None:
        """When the request's last token came. None before the first, and for an unknown request."""
        request = self._decoding.get(name)
        return None if request is None else request.last

    def beside(self, name: str) -> float:
        """`beside_last` of a request that decodes; 0.0 for others."""
        request = self._decoding.get(name)
        return 0.0 if request is None else request.beside_last

    def produce(self, name: str, now: float, tokens: int, beside: float) -> ServedRequest | None:
        """Add tokens to a request. None: it is not inside."""
        request = self._decoding.get(name)
        if request is None:
            request = self._waiting.pop(name, None)
            if request is None:
                return None
            self._earliest = None
            request.first, request.beside_first = now, beside
            self._decoding[name] = request
        request.last, request.beside_last = now, beside
        request.tokens += tokens
        self._due[name] = self._deadline(request)
        return request

    def end(self, name: str) -> ServedRequest | None:
        """Remove a request. None: it was not inside."""
        request = self._waiting.pop(name, None)
        if request is not None:
            self._earliest = None
            return request
        self._due.pop(name, None)
        return self._decoding.pop(name, None)

    def point(self, ttft_aim: float, tpot_aim: float, gap_aim: float) -> float:
        """When all rollout work must be over, so that every request gets its first token `ttft_aim` seconds after its
        arrival, its mean time per token stays within `tpot_aim`, and each pause within `gap_aim`. Infinite if nothing
        is inside, minus infinite if an aim is 0."""
        return min(self._waiting_point(ttft_aim), self._decoding_point(tpot_aim, gap_aim))

    def _waiting_point(self, aim: float) -> float:
        if not self._waiting:
            return inf
        if aim <= 0.0:
            return -inf
        if self._earliest is None:
            self._earliest = self._earliest_waiting()
        return self._earliest + aim

    def _earliest_waiting(self) -> float:
        """Each request waits for those ahead of it; between two prefills all decoding requests make a token."""
        between = self._unloaded.decode_s(len(self._decoding))
        work, earliest = 0.0, inf
        for request in self._waiting.values():
            work += self._unloaded.prefill_s(request.prompt_tokens) + between
            earliest = min(earliest, request.arrived - work)
        return earliest

    def _decoding_point(self, aim: float, gap: float) -> float:
        if not self._decoding:
            return inf
        if aim <= 0.0 or gap <= 0.0:
            return -inf
        if (aim, gap) != self._due_for:
            self._due_for = (aim, gap)
            self._due = {name: self._deadline(request) for name, request in self._decoding.items()}
        return min(self._due.values()) - self._unloaded.decode_s(len(self._decoding))

    def _deadline(self, request: ServedRequest) -> float:
        aim, gap = self._due_for
        return min(request.last + gap, request.first + aim * request.tokens)


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
    """Learns latencies without rollouts, and the delays by rollouts: teaches `unloaded` and `steps`.

    Invariant: `beside` is the sum of rollout steps' durations. The overlap with a part of a request's life is the
    growth of that sum meanwhile, and never more than that part. A step is reported shortly after its end, so the sum at
    a token may lack the last part of a step.
    """

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


#: At a few requests a second these are a minute: as long as a disturbance is remembered.
_MEMORY: Final = 128


class AttainmentHeadroom:
    """Bounds how long rollouts may delay requests by how close requests come to their target without rollouts.
    `allowed`: the share of requests that may miss because of rollouts.

    A delay turns a request into a miss if the request's own latency is nearer to the target than the delay. Own
    latencies vary, and they vary more while something else disturbs the machine. So the bound is the distance from the
    target to the slowest requests lately that met it by themselves, except for as many as may miss. Without a
    disturbance it is wide.

    Invariant: a request that missed by itself says nothing about rollouts, and bounds nothing. All of it is lost with
    the process. Then nothing is known, and the bound is 0.
    """

    def __init__(self, allowed: float) -> None:
        self._allowed = allowed
        self._own = RecentValues(_MEMORY)

    def served(self, own_s: float, target_s: float, *, missed: bool) -> None:
        """A request would have taken `own_s` without rollouts. `missed`: it met its target but for them."""
        self._own.add(min(own_s, target_s) if missed else own_s)

    def within(self, target_s: float) -> float:
        """The longest delay by which few enough of the last requests would have missed this target, in seconds; 0.0
        while no request met it by itself."""
        spared = int(self._allowed * len(self._own))
        slowest = self._own.largest_within(target_s, besides=spared)
        return target_s - slowest if slowest else 0.0
