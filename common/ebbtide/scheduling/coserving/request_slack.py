"""The slack of served requests: how long rollouts may still hold them up before one misses what it is to attain.

After ROSE's test (see `governor`), with two differences. The queue counts: prefill is serial, so a request waits for
the work of those ahead of it too. And the next token of a request that decodes has two deadlines, of which the earlier
holds: by one the pause since its last token stays bearable, by the other the request's mean so far stays within the
aim, so that one which others have slowed down already is left alone.

Invariant: a request is in `_waiting`, in order of arrival, until its first token, and from then on in `_decoding` and
`_due` until its end. `_due` has the deadline of each one's next token for the aims `_due_for`.
"""

from math import inf

from msgspec import Struct

from ebbtide.scheduling.coserving.unloaded_latency import UnloadedLatency


class ServedRequest(Struct):
    """One served request inside; times in seconds. `first`, `last`: when those tokens came. `beside`: how long rollout
    steps had run, in sum over the governor's life, when it came; `beside_first` and `beside_last` at those tokens.
    `missed`: it missed a target and would not have without rollouts."""

    arrived: float
    prompt_tokens: int
    beside: float = 0.0
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0
    beside_first: float = 0.0
    beside_last: float = 0.0
    missed: bool = False
    streamed: bool = True


class SlackBook:
    """Who is inside, and until when rollouts may go on beside them."""

    def __init__(self, unloaded: UnloadedLatency) -> None:
        self._unloaded = unloaded
        self._waiting: dict[str, ServedRequest] = {}
        self._decoding: dict[str, ServedRequest] = {}
        self._due: dict[str, float] = {}
        self._due_for = (0.0, 0.0)
        self._earliest: float | None = None  # of those that wait: arrival less the work up to its first token

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
        """When its last token came. None before the first, and for one that is not inside."""
        request = self._decoding.get(name)
        return None if request is None else request.last

    def beside(self, name: str) -> float:
        """`beside_last` of one that decodes; 0.0 of others."""
        request = self._decoding.get(name)
        return 0.0 if request is None else request.beside_last

    def produce(self, name: str, now: float, tokens: int, beside: float) -> ServedRequest | None:
        """It made `tokens` more. None if it is not inside."""
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
        """It is not inside any more. None if it was not."""
        request = self._waiting.pop(name, None)
        if request is not None:
            self._earliest = None
            return request
        self._due.pop(name, None)
        return self._decoding.pop(name, None)

    def point(self, ttft_aim: float, tpot_aim: float, gap_aim: float) -> float:
        """By when all rollout work has to be over, if every request is to have its first token `ttft_aim` seconds after
        its arrival, and its next one so that its mean stays within `tpot_aim` and the pause within `gap_aim`. Infinite
        where nothing is inside; with an aim of 0 long ago."""
        return min(self._waiting_point(ttft_aim), self._decoding_point(tpot_aim, gap_aim))

    def _waiting_point(self, aim: float) -> float:
        if not self._waiting:
            return inf
        if aim <= 0.0:
            return -inf
        if self._earliest is None:
            self._earliest = self._queue()
        return self._earliest + aim

    def _queue(self) -> float:
        """Each waits for those ahead of it, and between two of them all that decode make a token."""
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
