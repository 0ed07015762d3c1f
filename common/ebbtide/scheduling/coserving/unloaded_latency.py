"""Learns the latency of an unloaded serving engine from its traffic, and predicts prefill and decode times.

Invariant: a latency is learnt only from requests without other requests or rollouts beside them. Decode steps are
learnt by the number of requests in them, so other requests may decode too, as long as none waits for its first token.
"""

from math import inf
from typing import Final

from ebbtide.scheduling.coserving.cost_line import CostLine, RecentValues

#: Requests needed before the engine's latency counts as known.
LEARNT: Final = 20
_MEMORY: Final = 256


class UnloadedLatency:
    """The latency of an unloaded engine."""

    def __init__(self) -> None:
        self._prefill = CostLine(memory=_MEMORY, margin=0.9)
        self._decode = CostLine(memory=_MEMORY, margin=0.9)
        self._ttft = RecentValues(_MEMORY)
        self._tpot = RecentValues(_MEMORY)

    def began(self, prompt_tokens: int, seconds: float) -> None:
        """A request without others beside it had its first token after `seconds`."""
        self._prefill.observe(max(1, prompt_tokens), seconds)
        self._ttft.add(seconds)

    def finished(self, tokens: int, seconds: float) -> None:
        """A request without others beside it made `tokens` in `seconds` after its first token."""
        if tokens > 0 and seconds > 0:
            self._tpot.add(seconds / tokens)

    def decoded(self, batch: int, seconds: float) -> None:
        """One of `batch` requests that decode made a token `seconds` after its previous one."""
        self._decode.observe(batch, seconds)

    def prefill_s(self, prompt_tokens: int) -> float:
        """From the start of a request's prefill to its first token, at a quantile; infinite while unknown."""
        return self._prefill.predicted(max(1, prompt_tokens))

    def typical_prefill_s(self, prompt_tokens: int) -> float:
        """The same without a margin."""
        return self._prefill.typical(max(1, prompt_tokens))

    def decode_s(self, batch: int) -> float:
        """From one token of a request to its next in a batch, at a quantile; infinite while unknown."""
        return self._decode.predicted(batch) if batch else 0.0

    def typical_decode_s(self, batch: int) -> float:
        """The same without a margin."""
        return self._decode.typical(max(1, batch))

    def ttft_s(self, percentile: float) -> float:
        """TTFT without load; 0.0 until enough requests were seen."""
        return self._ttft.quantile(percentile / 100) if len(self._ttft) >= LEARNT else 0.0

    def tpot_s(self, percentile: float) -> float:
        """TPOT without load; 0.0 until enough requests were seen."""
        return self._tpot.quantile(percentile / 100) if len(self._tpot) >= LEARNT else 0.0

    @property
    def usual_decode_s(self) -> float:
        """Time per token of a single request, without a margin; infinite until enough were seen."""
        return self.typical_decode_s(1) if self._decode.count >= LEARNT else inf
