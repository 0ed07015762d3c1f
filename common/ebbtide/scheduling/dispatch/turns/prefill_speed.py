"""Learns how fast a worker reads prompts: the ratio of tokens to seconds, in which older reads fade.

A read also takes a time that does not depend on its length, such as the rest of the step under way. It is not told
apart: lengths that hardly differ do not say how much it is. So a worker of short reads counts as somewhat slower than
a long one would find it, and never as faster than it was seen.

Invariant: the sums are those of the last few hundred reads, older ones fading, and of one read that was assumed, which
does not fade. Both are positive. Lost with the process; a few dozen reads teach the speed again.
"""

from typing import Final

#: Past reads weigh at most as many.
_MEMORY_READS: Final = 256.0
#: The assumed speed weighs as much as one read of so many tokens: about a turn of an agent.
_ASSUMED_TOKENS: Final = 512.0
#: An observation that is so many times what was expected counts as that: a pause that nobody reported, for example.
_SURPRISE: Final = 4.0
#: Reads before anything surprises.
_NOVICE_READS: Final = 16.0
#: Tokens/s: engines read neither slower nor faster.
_SLOWEST: Final = 1e1
_FASTEST: Final = 1e7


class PrefillSpeed:
    """One worker's speed. `assumed`: tokens/s, as long as nothing is known."""

    def __init__(self, assumed: float) -> None:
        self._assumed_s = _ASSUMED_TOKENS / min(_FASTEST, max(_SLOWEST, assumed))
        self._reads = self._tokens = self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Positive and finite."""
        return (_ASSUMED_TOKENS + self._tokens) / (self._assumed_s + self._seconds)

    def observe(self, reads: int, tokens: int, seconds: float) -> None:
        """Learn that so many prompts, of so many `tokens` not found in the cache, took so many `seconds` in all.

        Sums over a span do: they weigh as much as their tokens. Spans without a read are ignored.
        """
        if reads <= 0 or tokens <= 0 or not seconds > 0.0:
            return
        least_s, most_s = tokens / _FASTEST, tokens / _SLOWEST
        if self._reads >= _NOVICE_READS:
            expected_s = tokens / self.tokens_per_s
            least_s, most_s = max(least_s, expected_s / _SURPRISE), min(most_s, expected_s * _SURPRISE)
        fade = 1.0 - min(0.5, reads / _MEMORY_READS)
        self._reads = fade * self._reads + reads
        self._tokens = fade * self._tokens + tokens
        self._seconds = fade * self._seconds + min(most_s, max(least_s, seconds))
