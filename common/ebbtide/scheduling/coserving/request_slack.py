"""Computes the slack of served requests: how long rollouts may delay them before one misses its aim.

After ROSE's test (see `governor`), with two differences. The queue counts: prefill is serial, so a request also waits
for the work ahead of it. The next token of a request that decodes has two deadlines, and the earlier one holds. One
bounds the pause since its last token. The other keeps the request's mean within the aim, so that a request which was
already slowed down is not slowed further.

Invariant: a request is in `_waiting`, in order of arrival, until its first token, and from then on in `_decoding` and
`_due` until its end. `_due` holds the deadline of each request's next token for the aims `_due_for`.
"""

from math import inf

from msgspec import Struct

from ebbtide.scheduling.coserving.unloaded_latency import UnloadedLatency


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
    """Keeps the requests inside, and computes until when rollouts may go on beside them."""

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
