"""What a served engine's latency is while nothing else goes on, learnt from its traffic, and what it predicts.

Invariant: only what ran without another request and without rollouts beside it is learnt as unloaded. Of a decode step
the number of requests in it counts too, so those are learnt with others beside, as long as none waits for its first
token.
"""

from math import inf
from typing import Final

from ebbtide.scheduling.coserving.cost_line import CostLine, RecentValues

#: So many requests, not fewer, say what the engine's latency is.
LEARNT: Final = 20
_MEMORY: Final = 256


class UnloadedLatency:
    def __init__(self) -> None:
        self._prefill = CostLine(memory=_MEMORY, margin=0.9)
        self._decode = CostLine(memory=_MEMORY, margin=0.9)
        self._ttft = RecentValues(_MEMORY)
        self._tpot = RecentValues(_MEMORY)

    def began(self, prompt_tokens: int, seconds: float) -> None:
        """A request all alone had its first token after so long."""
        self._prefill.observe(max(1, prompt_tokens), seconds)
        self._ttft.add(seconds)

    def finished(self, tokens: int, seconds: float) -> None:
        """A request all alone made `tokens` in `seconds` behind its first."""
        if tokens > 0 and seconds > 0:
            self._tpot.add(seconds / tokens)

    def decoded(self, batch: int, seconds: float) -> None:
        """A token of one of `batch` requests that all decode came so long after the one before it."""
        self._decode.observe(batch, seconds)

    def prefill_s(self, prompt_tokens: int) -> float:
        """From the begin of a request's service to its first token, at a quantile; infinite while unknown."""
        return self._prefill.predicted(max(1, prompt_tokens))

    def typical_prefill_s(self, prompt_tokens: int) -> float:
        """The same without a margin."""
        return self._prefill.typical(max(1, prompt_tokens))

    def decode_s(self, batch: int) -> float:
        """From one token of a request to its next, with `batch` of them, at a quantile; infinite while unknown."""
        return self._decode.predicted(batch) if batch else 0.0

    def typical_decode_s(self, batch: int) -> float:
        """The same without a margin."""
        return self._decode.typical(max(1, batch))

    def ttft_s(self, percentile: float) -> float:
        """Of requests all alone; 0.0 until enough were seen."""
        return self._ttft.quantile(percentile / 100) if len(self._ttft) >= LEARNT else 0.0

    def tpot_s(self, percentile: float) -> float:
        """Of requests all alone; 0.0 until enough were seen."""
        return self._tpot.quantile(percentile / 100) if len(self._tpot) >= LEARNT else 0.0

    @property
    def usual_decode_s(self) -> float:
        """From one token of a request alone to its next, without a margin; infinite until enough were seen."""
        return self.typical_decode_s(1) if self._decode.count >= LEARNT else inf
