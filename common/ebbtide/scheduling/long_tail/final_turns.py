"""Tells the steps of an environment that score from those that give the next turn.

A step that ends its episode is a scoring: nobody waits for another turn. Which one it will be is known before for the
last turn that a run allows. Else it is learnt: where all of the last steps at a turn ended their episodes, the next one
is taken for a scoring. A wrong guess costs time alone, as any process can make an episode again from its responses,
unless that step outlasts the limit of scorings: then it is cut as one.
"""

from typing import Final

from msgspec import Struct

#: Steps in a row that ended their episodes, until the next one is taken for a scoring.
LEARNT: Final = 16
#: Replaying an episode must not take longer than this, or than the scoring itself, whichever is more.
_CHEAP_S: Final = 0.05
_WEIGHT: Final = 0.2


class _Turn(Struct):
    ended: int = 0  # steps in a row
    mean_s: float = 0.0  # of its steps, newer ones more


class FinalTurns:
    """Knows the turns of one run's episodes. Lost with the process: it is learnt again."""

    def __init__(self) -> None:
        self._turns: dict[int, _Turn] = {}

    def scores(self, turn: int, *, last: bool) -> bool:
        """Whether the step at `turn` (from 0) should be scored apart. `last`: the run allows no further one."""
        known = self._turns.get(turn, _Turn())
        if not last and known.ended < LEARNT:
            return False
        replay_s = sum(self._turns.get(one, _Turn()).mean_s for one in range(turn))
        return replay_s <= max(known.mean_s, _CHEAP_S)

    def note(self, turn: int, took_s: float, *, ended: bool) -> None:
        """A step took so long, and ended its episode or did not."""
        known = self._turns.setdefault(turn, _Turn(mean_s=took_s))
        known.mean_s += _WEIGHT * (took_s - known.mean_s)
        known.ended = known.ended + 1 if ended else 0
