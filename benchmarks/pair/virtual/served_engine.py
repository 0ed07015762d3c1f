"""Models the served engine: it prefills prompts in chunks and decodes all other requests in the same steps.

Invariant: a request is in `_queued` until its prompt fits beside the others into the engine's memory, then in
`_prefilling` until its first token, and then in `_decoding` until its last.
"""

from collections import deque
from typing import Final

from msgspec import Struct

from benchmarks.pair.virtual.pair_costs import PairCosts
from ebbtide.demo.coserving.request_traffic import TrafficRequest

_MIB: Final = 1 << 20


class ServedCall(Struct):
    """One user's request. Times are in seconds of virtual time; 0.0: not yet."""

    name: str
    asked: TrafficRequest
    left: int  # tokens of the prompt to be prefilled
    first: float = 0.0  # when its first token came
    last: float = 0.0
    made: int = 0

    @property
    def ttft_s(self) -> float:
        return self.first - self.asked.at

    @property
    def tpot_s(self) -> float:
        """Mean time of each token after the first; 0.0 if there is none."""
        return (self.last - self.first) / (self.made - 1) if self.made > 1 else 0.0

    def meets(self, ttft_s: float, tpot_s: float) -> bool:
        """Whether both latencies are within these targets."""
        return self.ttft_s <= ttft_s and self.tpot_s <= tpot_s


class ServedEngine:
    """One step at a time: `begin` says what it takes, and `end` what it made."""

    def __init__(self, costs: PairCosts) -> None:
        self._costs = costs
        memory = costs.memory
        pool = (memory.serving_kv_mib or memory.limit_mib) * _MIB
        self._room = pool // memory.served_token_bytes if memory.served_token_bytes and pool else 0
        self._queued: deque[ServedCall] = deque()
        self._prefilling: deque[ServedCall] = deque()
        self._decoding: list[ServedCall] = []
        self._chunks: list[tuple[ServedCall, int]] = []
        self._inside = 0
        self.tokens_inside = 0  # of prompts and answers so far, of the requests that it has begun

    def __len__(self) -> int:
        return self._inside

    def take(self, call: ServedCall) -> None:
        """A request arrives at the engine."""
        self._queued.append(call)
        self._inside += 1

    def begin(self) -> float:
        """Begin a step. Returns its seconds without noise; 0.0: there is no work."""
        self._admit()
        costs, room, seconds = self._costs, self._costs.chunk_tokens, 0.0
        self._chunks = []
        for call in self._prefilling:
            if room <= 0:
                break
            tokens = min(room, call.left)
            room -= tokens
            seconds += costs.prefill_s * (call.left == call.asked.prompt) + costs.prefill_token_s * tokens
            self._chunks.append((call, tokens))
        return seconds + costs.decode(len(self._decoding))

    def end(self, now: float) -> list[ServedCall]:
        """End the step. Returns the requests that made a token in it; those that ended have left."""
        produced = list(self._decoding)
        for call, tokens in self._chunks:
            call.left -= tokens
            if not call.left:
                self._prefilling.popleft()
                self._decoding.append(call)
                produced.append(call)
        for call in produced:
            call.made += 1
            call.last = now
            call.first = call.first or now
            if call.made >= call.asked.output:
                self._decoding.remove(call)
                self._inside -= 1
                self.tokens_inside -= call.asked.prompt + call.made - 1
            else:
                self.tokens_inside += 1
        return produced

    def _admit(self) -> None:
        """Begin queued requests in order, as long as their prompts fit. An empty engine takes any prompt."""
        while self._queued:
            prompt = self._queued[0].asked.prompt
            if self._room and self.tokens_inside and self.tokens_inside + prompt > self._room:
                return
            self.tokens_inside += prompt
            self._prefilling.append(self._queued.popleft())
