"""Limits the time of a scoring by how long right answers to its problem took.

The limit is `clamp(1.5 x anchor, 2 s, ceiling)`, as in RollPacker's reward scheduler (NSDI 2026). The anchor is the
longest time of a right answer to the problem. Taken alone that rule locks out: a right answer slower than the limit
scores nothing, so the anchor never rises. Three things prevent this.

- A problem with few right answers also gets the anchor of all problems, and a run with none gets the ceiling.
- Of the scorings that reach their limit, some are explored: they go on up to the ceiling. A problem's scorings are cut
  at most `MOST_CUT` times in a row, and `MOST_CUT_YOUNG` times while its anchor is young. So a right answer that is
  slower than the limit, but not than the ceiling, gets through at the latest in its next try.
- A right answer beyond the limit raises the anchor to its own time, and makes exploration more frequent.

Times are a scoring's own: the seconds that its processes waited for a CPU are not counted, where they are known.
Nothing here is random: which scorings are explored follows from a hash of a count.
"""

from collections import OrderedDict, deque
from typing import Final
from zlib import crc32

from msgspec import Struct

#: RollPacker's factor and its least limit.
FACTOR: Final = 1.5
LEAST_S: Final = 2.0
#: Right answers until a problem's anchor is old. An advantage needs several answers; so does a maximum.
YOUNG: Final = 4
#: Scorings of a problem that are cut in a row, at most.
MOST_CUT: Final = 7
MOST_CUT_YOUNG: Final = 3
#: One of so many is explored besides: often at first, seldom once exploring finds nothing.
_EVERY_FIRST: Final = 2
_EVERY_MOST: Final = 16
#: Right answers of all problems that make the common anchor: some steps' worth.
_RECENT: Final = 512
#: Problems that are remembered: the last ones of a large data set. Each takes some hundred bytes.
_PROBLEMS: Final = 50_000


class _Problem(Struct):
    right: int = 0
    anchor_s: float = 0.0
    cut: int = 0  # in a row, since one was explored or was right


class RewardLimits:
    """Knows the scoring times of one run.

    Invariant: `limit_s` is at most the ceiling. Lost with the process: all anchors. The next one begins with the
    ceiling, so that costs time and no right answer.
    """

    def __init__(self, ceiling_s: float, *, adapts: bool) -> None:
        """`ceiling_s`: the most seconds of a scoring. Without `adapts` it is the limit of all."""
        self.ceiling_s, self._adapts = ceiling_s, adapts
        self._problems: OrderedDict[str, _Problem] = OrderedDict()
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._reached = 0  # limits, in the present window
        self._every = _EVERY_FIRST
        self._windows = 0

    def limit_s(self, problem: str) -> float:
        """The seconds of its own that a scoring may take, unless it is explored."""
        anchor_s = self._anchor(problem)
        if not self._adapts or anchor_s is None:
            return self.ceiling_s
        return min(max(FACTOR * anchor_s, LEAST_S), self.ceiling_s)

    def explores(self, problem: str) -> bool:
        """A scoring reached its limit: whether it goes on, up to the ceiling. Otherwise it is to be cut."""
        if self.limit_s(problem) >= self.ceiling_s:
            return False  # nothing is left to go on for
        known = self._known(problem)
        explored = self._drawn() or known.cut >= (MOST_CUT_YOUNG if known.right < YOUNG else MOST_CUT)
        known.cut = 0 if explored else known.cut + 1
        return explored

    def note(self, problem: str, own_s: float, *, right: bool, explored: bool = False) -> None:
        """A scoring took so many seconds, or was cut after them. `right`: its answer was."""
        if explored:
            self._every = max(_EVERY_FIRST, self._every // 2) if right else min(_EVERY_MOST, self._every * 2)
        if right:
            known = self._known(problem)
            known.right, known.cut = known.right + 1, 0
            known.anchor_s = max(known.anchor_s, own_s)
            self._recent.append(own_s)

    def _anchor(self, problem: str) -> float | None:
        known = self._problems.get(problem)
        if known is None or not known.right:
            return max(self._recent, default=None)
        if known.right >= YOUNG:
            return known.anchor_s
        return max(known.anchor_s, *self._recent)

    def _known(self, problem: str) -> _Problem:
        known = self._problems.setdefault(problem, _Problem())
        self._problems.move_to_end(problem)
        if len(self._problems) > _PROBLEMS:
            self._problems.popitem(last=False)
        return known

    def _drawn(self) -> bool:
        """Picks one in each window of `_every` scorings, at a place that differs from window to window."""
        at, self._reached = self._reached, self._reached + 1
        picked = at == crc32(f"{self._windows}".encode()) % self._every
        if self._reached >= self._every:
            self._reached, self._windows = 0, self._windows + 1
        return picked
