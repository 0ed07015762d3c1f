"""Decides whether rollouts may start while the coordinator is behind with what workers send.

Rollouts that start make workers send more. So after a slow turn of the event loop none starts for some such turns. At
least one batch starts in each `_LONGEST_S`.
"""

import math
from typing import Final

#: A turn of the event loop that takes longer shows that the coordinator is behind.
_BEHIND_S: Final = 0.05
_TURNS: Final = 3.0
_LONGEST_S: Final = 1.0


class StartPacing:
    def __init__(self) -> None:
        self._held_until = -math.inf

    def held_s(self, now: float) -> float:
        """For how many seconds no rollout may start; 0: one may."""
        return max(0.0, self._held_until - now)

    def note_turn(self, turn_s: float, now: float) -> bool:
        """Note how long the event loop's turn took after a batch of starts. Whether none may start now."""
        if turn_s > _BEHIND_S:
            self._held_until = now + min(_LONGEST_S, _TURNS * turn_s)
        return self.held_s(now) > 0.0
