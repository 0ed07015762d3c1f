"""Bounds the moves of running rollouts: keeps them few, compares what they promised with what came of them, and stops a
rule that promises too much.

A move promises how many tokens its rollout will make on the new engine until the move has paid back: that follows from
speeds, loads and reading as they were estimated. Then it is compared with what the rollout made. One says little, since
workers come and go meanwhile; the sums over recent moves decide.

Invariant: the sums are of the moves judged so far, older ones fading in `_promised` and `_made`. Lost with the process:
the rule is trusted again until some moves were judged.
"""

from math import inf
from typing import Final

#: Of what was judged before, so much still counts after each further move: some twenty moves decide.
_FADE: Final = 0.95
#: The rule is believed until as much as so many moves was judged,
_NOVICE: Final = 8.0
#: and while recent moves made at least this share of what they promised.
_LEAST: Final = 0.6
#: Otherwise one move is tried this often, to see whether that still holds.
_PROBE_S: Final = 60.0
#: Most moves for each rollout that has finished, and for each that runs: a move costs a hand-over and reading, so it is
#: the exception. Where a second worker joins, nearly half of those that run may go there.
_PER_FINISHED: Final = 0.25
_PER_RUNNING: Final = 0.45


class MoveLedger:
    """Of one run. Rollouts that ended or were interrupted before their moves could pay back are not judged."""

    def __init__(self) -> None:
        self.moves = self.judged = 0
        self.finished = 0  # rollouts of the run meanwhile
        self.promised_tokens = self.made_tokens = 0.0
        self._promised = self._made = self._weight = 0.0
        self._probed = -inf
        self._untold = 0

    @property
    def trusted(self) -> bool:
        """Whether recent moves kept enough of what they promised."""
        return self._weight < _NOVICE or self._made >= _LEAST * self._promised

    @property
    def kept(self) -> float:
        """The share of what recent moves promised that came; 1.0 while none was judged."""
        return self._made / self._promised if self._promised else 1.0

    def allows(self, now: float, *, running: int) -> int:
        """How many rollouts may move now, if so many are `running`."""
        left = max(0, int(_PER_FINISHED * self.finished + _PER_RUNNING * running) - self.moves)
        if self.trusted:
            return left
        return min(1, left) if now - self._probed >= _PROBE_S else 0

    def asked(self, moves: int, now: float) -> None:
        """Note that so many running rollouts were asked back."""
        self.moves += moves
        self._untold += moves
        self._probed = now

    def take_moves(self) -> int:
        """Those since the last call."""
        untold, self._untold = self._untold, 0
        return untold

    def judge(self, promised: float, made: float) -> None:
        """Note how many tokens a rollout should have made since its move, and how many it made."""
        if promised <= 0.0:
            return
        self.judged += 1
        self.promised_tokens += promised
        self.made_tokens += made
        self._promised = _FADE * self._promised + promised
        self._made = _FADE * self._made + made
        self._weight = _FADE * self._weight + 1.0
