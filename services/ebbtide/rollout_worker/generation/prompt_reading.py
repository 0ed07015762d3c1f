"""Counts what the engine reads of prompts, and how long that takes: what the coordinator learns its prefill from.

A read lasts from the arrival of a request, or from the first token of another one that was read meanwhile, to the next
first token. That is as if the engine read one prompt at a time, in the order of arrival. It is an approximation for
engines that read parts of several prompts in a step, decode in the same steps, and let requests wait for a slot or for
memory. Sums over many reads are right while the engine always reads if it has something to read; what it does besides,
and what it waits for, makes reading look slower.

A span in which generation was held, or a request was abandoned, counts as if it had not been. So does a span in which a
prompt was being scored: its logprobs take much longer than its reading.

Invariant: `_unread` has the requests in the engine without a token, `_scored` those of them whose prompts are scored,
and `_since` is when the present span began. The counts grow with the process, and are lost with it.
"""

from typing import Final

from ebbtide.rollout_worker import metrics

#: First tokens within so many seconds left the engine with one step: that was one read.
_STEP_S: Final = 1e-3


class PromptReading:
    def __init__(self) -> None:
        self.reads = self.tokens = 0  # `tokens`: without those found in the cache
        self.seconds = 0.0
        self._unread: set[str] = set()
        self._scored: set[str] = set()
        self._since = 0.0
        self._spoilt = False

    def begin(self, attempt_id: str, now: float, *, scored: bool = False) -> None:
        """A request goes to the engine. `scored`: with logprobs of its prompt."""
        if not self._unread:
            self._since, self._spoilt = now, False
        self._unread.add(attempt_id)
        if scored:
            self._scored.add(attempt_id)
            self._spoilt = True

    def first_token(self, attempt_id: str, tokens: int, cached: int, now: float) -> None:
        """The engine has read a request of so many `tokens`, of which it had `cached`."""
        if attempt_id not in self._unread:
            return
        self._unread.discard(attempt_id)
        self._scored.discard(attempt_id)
        metrics.PROMPT_TOKENS.labels("read").inc(tokens - cached)
        metrics.PROMPT_TOKENS.labels("cached").inc(cached)
        if not self._spoilt:
            lasted_s = now - self._since
            self.reads += lasted_s >= _STEP_S or not self.reads
            self.tokens += tokens - cached
            self.seconds += lasted_s
        self._since, self._spoilt = now, bool(self._scored)

    def abandon(self, attempt_id: str) -> None:
        """A request leaves the engine; nothing changes if it has a token."""
        if attempt_id in self._unread:
            self._unread.discard(attempt_id)
            self._scored.discard(attempt_id)
            self._spoilt = True

    def disturb(self) -> None:
        """Generation is held, or goes on."""
        self._spoilt = True
