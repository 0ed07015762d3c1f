"""Learns how fast a worker reads prompts: seconds of reading against reads and tokens, by weighted least squares.

A read takes a part that does not depend on its length (the step under way, and the step that it would have cost anyway)
and a part per token. Only the second one is what a longer prefix costs, and what keeps other rollouts waiting. It is
known as well as the lengths of reads differ; until they do, the assumed speed counts.

Invariant: the sums are those of the last few hundred reads, older ones fading, and of one read that was assumed. Lost
with the process; a few dozen reads teach it again.
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
#: No engine reads a token in less, or needs longer.
_LEAST_S: Final = 1e-7
_MOST_S: Final = 1e-1


class PrefillSpeed:
    """One worker's speed. `assumed`: tokens/s, as long as nothing is known."""

    def __init__(self, assumed: float) -> None:
        self._reads = self._tokens = self._seconds = 0.0
        self._squares = _ASSUMED_TOKENS**2  # of tokens, each over its reads, as the next one
        self._products = self._squares / assumed  # of tokens and seconds
        self._read_s = 0.0  # of a read, whatever its length
        self._token_s = 1.0 / assumed

    @property
    def tokens_per_s(self) -> float:
        """What a token more costs, as its inverse."""
        return 1.0 / self._token_s

    def observe(self, reads: int, tokens: int, seconds: float) -> None:
        """Learn that so many prompts, of so many `tokens` not found in the cache, took so many `seconds` in all.

        Sums over a span do: they weigh as much as their reads. Spans without a read are ignored.
        """
        if reads <= 0 or tokens <= 0 or not seconds > 0.0:
            return
        if self._reads >= _NOVICE_READS:
            expected = self._read_s * reads + self._token_s * tokens
            seconds = min(_SURPRISE * expected, max(expected / _SURPRISE, seconds))
        fade = 1.0 - min(0.5, reads / _MEMORY_READS)
        self._reads = fade * self._reads + reads
        self._tokens = fade * self._tokens + tokens
        self._seconds = fade * self._seconds + seconds
        self._squares = fade * self._squares + tokens * tokens / reads
        self._products = fade * self._products + tokens * seconds / reads
        self._fit()

    def _fit(self) -> None:
        determinant = self._reads * self._squares - self._tokens**2
        token_s = (self._reads * self._products - self._tokens * self._seconds) / determinant
        self._read_s = (self._seconds - token_s * self._tokens) / self._reads
        if self._read_s < 0.0 or determinant <= 0.0:  # no read has less than no costs of its own
            self._read_s, token_s = 0.0, self._products / self._squares
        self._token_s = min(_MOST_S, max(_LEAST_S, token_s))
