"""The line of queued rollouts of one run: by priority, then by place, so that a re-queued rollout is where it was.

Invariant: `_order` holds the key of each member of `_waiting`, sorted, and `_bounds` counts their bounds. A mirror of
what the store holds: lost with the process, and read back at its start.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator

from msgspec import Struct

from ebbtide.scheduling.pacing import Bounds


class Waiting(Struct, frozen=True, kw_only=True):
    """A queued rollout. `length`: tokens of prompt and partial; `place`: in line; `since`: when it came into it.

    `avoid`: workers, by their own names, that fell silent with it; `barren`: attempts in a row that ended in vain;
    `prefer`: the worker that a move chose for it ("": none); `made`: of `length`, tokens of the response; `budget`:
    tokens that it may still make (0: not known).
    """

    rollout_id: str
    episode_id: str
    bounds: Bounds
    length: int
    place: int
    priority: int = 0
    since: float = 0.0
    avoid: frozenset[str] = frozenset()
    barren: int = 0
    prefer: str = ""
    made: int = 0
    budget: int = 0


class Line:
    def __init__(self) -> None:
        self._order: list[tuple[int, int, str]] = []
        self._waiting: dict[str, Waiting] = {}
        self._bounds: Counter[Bounds] = Counter()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, rollout_id: str) -> bool:
        return rollout_id in self._waiting

    def __iter__(self) -> Iterator[Waiting]:
        return (self._waiting[key[2]] for key in self._order)

    def add(self, one: Waiting) -> None:
        """Put `one` in line; a member of the same id gives way."""
        self.remove(one.rollout_id)
        self._waiting[one.rollout_id] = one
        self._bounds[one.bounds] += 1
        insort(self._order, _key(one))

    def remove(self, rollout_id: str) -> Waiting | None:
        """Take a rollout out of line; None if it is not there."""
        one = self._waiting.pop(rollout_id, None)
        if one is not None:
            del self._order[bisect_left(self._order, _key(one))]
            self._bounds -= Counter((one.bounds,))  # keeps none that is down to zero
        return one

    def bounds(self) -> set[Bounds]:
        """The distinct version bounds in line."""
        return set(self._bounds)


def _key(one: Waiting) -> tuple[int, int, str]:
    return one.priority, one.place, one.rollout_id
