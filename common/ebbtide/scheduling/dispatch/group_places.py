"""Remembers the place in the queue that each group has: that of its first rollout.

So rollouts that come later, such as an episode's next turn, wait where their group does.

Invariant: a group is known from its first rollout on, until nothing of it is open; of too many, those that were asked
for last. Lost with the process: a group then has the place of its first rollout that is still open.
"""

from typing import Final

#: Groups that are remembered.
_GROUPS: Final = 1 << 16


class GroupPlaces:
    def __init__(self, memory: int = _GROUPS) -> None:
        self._memory = memory
        self._places: dict[str, int] = {}  # by group
        self._groups: dict[int, str] = {}  # by place

    def of(self, group_id: str, place: int) -> int:
        """The group's place: `place`, if this is its first rollout."""
        found = self._places[group_id] = self._places.pop(group_id, place)
        self._groups[found] = group_id
        if len(self._places) > self._memory:
            self.forget(next(iter(self._places.values())))
        return found

    def forget(self, place: int) -> None:
        """Note that nothing of the group at this place is open."""
        group_id = self._groups.pop(place, None)
        if group_id is not None:
            del self._places[group_id]
