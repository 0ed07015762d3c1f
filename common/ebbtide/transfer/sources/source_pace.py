"""Measures how fast a source sends.

Invariant: a source counts as slow only by the time in which a stream waited for it. Its rate counts all the time in
which it was read, its readers' own work included. So neither figure flatters the source that is preferred.
"""

import math
from typing import Final

#: Time of waiting over which the latest rate is taken.
LONG_S: Final = 5.0
#: Fewer bytes measure a link's delay, not its rate.
_MANY_BYTES: Final = 1 << 20


class PaceWatch:
    """Sums the seconds between its starts and stops."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._before = 0.0

    def start(self, now: float) -> None:
        self._since = now

    def stop(self, now: float) -> None:
        self._before, self._since = self.seconds(now), None

    def seconds(self, now: float) -> float:
        return self._before + (0.0 if self._since is None else now - self._since)


class SourcePace:
    """`reading` runs while a source has streams, `waiting` while one of them waits for it."""

    def __init__(self) -> None:
        self.reading, self.waiting = PaceWatch(), PaceWatch()
        self.bytes_per_s = 0.0  # over all reading; 0: not known
        self.lately = math.inf  # bytes/s over the last `LONG_S` of waiting
        self._bytes = 0
        self._marked = 0.0, 0  # the waiting and the bytes when `lately` was last computed

    def came(self, size: int, now: float) -> None:
        """Count bytes that have come."""
        self._bytes += size
        if self._bytes >= _MANY_BYTES and (seconds := self.reading.seconds(now)):
            self.bytes_per_s = self._bytes / seconds
        waited, (since, before) = self.waiting.seconds(now), self._marked
        if waited - since >= LONG_S:
            self.lately = (self._bytes - before) / (waited - since)
            self._marked = waited, self._bytes

    def forget(self) -> None:
        """Drop the latest rate."""
        self.lately = math.inf
