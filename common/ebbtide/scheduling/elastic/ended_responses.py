"""Remembers the groups of which responses ended, and which are not complete.

Invariant: `by_group` has each episode whose newest response ended, until its next turn begins or the episode is over;
of too many, the newest. Lost with the process: until the open groups are complete, those that ended are not known.
"""

from typing import Final

#: Episodes that are remembered. Trainers that neither complete nor acknowledge them leave them here.
_EPISODES: Final = 1 << 17


class EndedResponses:
    def __init__(self, memory: int = _EPISODES) -> None:
        self._memory = memory
        self._groups: dict[str, int] = {}  # episode -> its group
        self.by_group: dict[int, set[str]] = {}  # group -> episodes

    def ended(self, episode_id: str, group: int) -> None:
        """Note that a response of the episode ended."""
        self.forget(episode_id)
        self._groups[episode_id] = group
        self.by_group.setdefault(group, set()).add(episode_id)
        if len(self._groups) > self._memory:
            self.forget(next(iter(self._groups)))

    def forget(self, episode_id: str) -> int | None:
        """Note that the episode is over, or goes on. Returns its group, if it was known."""
        group = self._groups.pop(episode_id, None)
        if group is not None:
            members = self.by_group[group]
            members.remove(episode_id)
            if not members:
                del self.by_group[group]
        return group
