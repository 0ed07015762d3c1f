"""Decides how many rollouts a worker takes, by what its memory holds of keys and values.

Each rollout is counted with the most tokens that it will probably hold at one moment: a response that grows needs more
later, and one that may end soon needs that less probably. For rollouts that began together the sum is the peak of their
memory. For rollouts of all ages it is somewhat more than they hold at a time (a tenth, if lengths are exponential).

A worker with fewer slots than its memory holds rollouts makes fewer tokens than it could. With more, rollouts wait in
its engine for memory while other workers have room, or are preempted and read again.
"""

from bisect import bisect_right
from itertools import accumulate
from typing import Final

from ebbtide.scheduling.long_tail.length_learner import LengthCurve

#: Lengths of responses for which the peak is tabulated, each so many times the one before.
_GROWTH: Final = 1.25
_SHORTEST: Final = 32.0
_STEPS: Final = 52  # up to some million tokens
#: Share of the memory that is planned for: blocks are not filled to their ends, and sums of few rollouts vary.
_FILLED: Final = 0.95


class PeakTokens:
    """The most tokens that a rollout will probably hold at one moment, by the tokens that it has made.

    A table for prompts of one length, made once; `lengths` may change afterwards.
    """

    def __init__(self, lengths: LengthCurve, prompt: float) -> None:
        self._made = [0.0, *(_SHORTEST * _GROWTH**step for step in range(_STEPS))]
        alive = lengths.outlasting(self._made)
        held = [share * (prompt + made) for share, made in zip(alive, self._made, strict=True)]
        #: At the end of the table backwards: the most that is held from there on, for each that gets so far.
        most = list(accumulate(reversed(held), max))[::-1]
        self._peaks = [one / share if share > 0.0 else 0.0 for one, share in zip(most, alive, strict=True)]
        self._prompt = prompt

    def of(self, made: float) -> float:
        """Tokens of prompt and response; `made`: of the response, so far. Interpolated between the table's lengths."""
        at = bisect_right(self._made, made)
        if at == len(self._made):
            return self._prompt + made
        low, high = self._made[at - 1], self._made[at]
        share = (made - low) / (high - low)
        return max(self._prompt + made, self._peaks[at - 1] + share * (self._peaks[at] - self._peaks[at - 1]))


def memory_slots(peaks: PeakTokens, *, kv_tokens: int, most: int, running: int, made: float) -> int:
    """The slots that a worker offers: its `running` rollouts, and as many new ones as its memory has room for. If
    it has none, the running ones are not replaced while they are more than would fit if all were new.

    `kv_tokens`: that fit into its memory, 0 if it does not say; `most`: the slots that it is set to; `made`: tokens of
    the running rollouts' responses, on average. At least one: a rollout that fits nowhere else has to run alone.
    """
    if not kv_tokens:
        return most
    memory, new = _FILLED * kv_tokens, max(1.0, peaks.of(0.0))
    room = memory - running * peaks.of(made)
    slots = running + int(room / new) if room >= 0.0 else min(running, int(memory / new))
    return max(1, min(most, slots))
