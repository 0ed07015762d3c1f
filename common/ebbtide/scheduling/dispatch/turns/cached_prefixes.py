"""Remembers which workers have keys and values of an episode's tokens, and of how many.

It is a belief: engines evict what they need room for, and say nothing of it. A wrong belief costs a prefill.

Invariant: of each episode the last workers are known, the latest one last. Lost with the process: each episode's next
turn is read again, wherever it goes.
"""

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

#: Episodes whose workers are remembered: no prefix cache lasts longer.
_EPISODES: Final = 1 << 16
#: Workers of an episode that are remembered.
_WORKERS: Final = 8


class CachedPrefix(Struct, frozen=True, gc=False):
    version: int  # of the weights that read it: an engine with others finds nothing
    tokens: int  # from the first one of the episode on


#: By episode, then by session.
Prefixes = Mapping[str, Mapping[str, CachedPrefix]]


class CachedPrefixes:
    def __init__(self) -> None:
        self._episodes: dict[str, dict[str, CachedPrefix]] = {}
        self.by_episode: Final[Prefixes] = self._episodes

    def began(self, episode_id: str, session_id: str, *, version: int, tokens: int) -> int:
        """Note that a worker reads so many tokens of the episode. Returns how many of them it had."""
        known = self._episodes.pop(episode_id, None) or {}
        before = known.pop(session_id, None)
        known[session_id] = CachedPrefix(version, tokens)
        if len(known) > _WORKERS:
            del known[next(iter(known))]
        self._episodes[episode_id] = known
        if len(self._episodes) > _EPISODES:
            del self._episodes[next(iter(self._episodes))]
        return min(before.tokens, tokens) if before is not None and before.version == version else 0

    def left(self, episode_id: str, tokens: int) -> None:
        """Note that the episode's last worker stopped with so many tokens of a turn."""
        known = self._episodes.get(episode_id)
        if known:
            session_id = next(reversed(known))
            known[session_id] = CachedPrefix(known[session_id].version, tokens)

    def forget(self, episode_id: str) -> None:
        """Note that the episode has no further turn."""
        self._episodes.pop(episode_id, None)
