"""Keeps the reasons for which generation is held on purpose: an install, a slow store, a drain.

Invariant: `reasons` has an entry from the begin of a hold to its end; a store that is slow for a moment causes none.
Watchers are told after each change, so that a heartbeat says at once whether tokens are to be expected. Nothing of this
outlives the process.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class GenerationHolds:
    """The reasons, and the watchers that are told of their changes."""

    def __init__(self) -> None:
        self.reasons: set[str] = set()
        self._told: list[Callable[[], None]] = []

    def __bool__(self) -> bool:
        return bool(self.reasons)

    def __contains__(self, reason: str) -> bool:
        return reason in self.reasons

    def watch(self, told: Callable[[], None]) -> None:
        """Have `told` called after every change, and when something else about to hold generation begins or ends."""
        self._told.append(told)

    def begin(self, reason: str) -> None:
        self.reasons.add(reason)
        self.tell()

    def end(self, reason: str) -> None:
        self.reasons.discard(reason)
        self.tell()

    @contextmanager
    def during(self, reason: str) -> Iterator[None]:
        self.begin(reason)
        try:
            yield
        finally:
            self.end(reason)

    def tell(self) -> None:
        for told in self._told:
            told()
