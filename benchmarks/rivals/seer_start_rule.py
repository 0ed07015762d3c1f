"""Picks which waiting request starts next, as Seer does (arXiv 2511.14617 v3, section on context-aware scheduling).

A group is taken to be as long as its longest finished member, and as the cap until one has finished. One member of each
group is its probe. While probes wait, the one that made the fewest tokens is picked; otherwise a member of the group
that is taken to be the longest. The paper also names a guard against starvation, and does not say how it works.
"""

from collections.abc import Sequence
from typing import NamedTuple


class BufferedRequest(NamedTuple):
    """A request that waits for its next chunk. `place`: in the order of submission; `made`: tokens."""

    place: int
    group: int
    made: int
    probe: bool


class SeerStartRule:
    """Invariant: `_longest` has the longest finished member of each group that has one."""

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self._longest: dict[int, int] = {}

    def finished(self, group: int, tokens: int) -> None:
        """Note that a member has its whole response."""
        self._longest[group] = max(tokens, self._longest.get(group, 0))

    def rank(self, one: BufferedRequest) -> tuple[int, int, int]:
        """The one of the lowest rank starts next."""
        if one.probe:
            return 0, one.made, one.place
        return 1, -self._longest.get(one.group, self._cap), one.place

    def pick(self, waiting: Sequence[BufferedRequest]) -> BufferedRequest:
        """The one that starts next. Call with at least one."""
        return min(waiting, key=self.rank)
