"""How fast a source sends.

Invariant: a source is judged only by the time in which somebody waited for it, and praised only for all the time in
which it was read, what its readers did with it meanwhile included: so neither flatters the one who is to be preferred.
"""

import math
from typing import Final

#: Time of waiting by which a source is judged.
LONG_S: Final = 5.0
#: Fewer bytes tell how long a way is, not how wide.
_MANY_BYTES: Final = 1 << 20


class PaceWatch:
    """The seconds between its starts and stops."""

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
        self.bytes_per_s = 0.0  # in all; 0: not known
        self.lately = math.inf  # bytes/s over the last `LONG_S` of waiting
        self._bytes = 0
        self._marked = 0.0, 0  # of the waiting, and of the bytes, when `lately` was last reckoned

    def came(self, size: int, now: float) -> None:
        """So many bytes have come."""
        self._bytes += size
        if self._bytes >= _MANY_BYTES and (seconds := self.reading.seconds(now)):
            self.bytes_per_s = self._bytes / seconds
        waited, (since, before) = self.waiting.seconds(now), self._marked
        if waited - since >= LONG_S:
            self.lately = (self._bytes - before) / (waited - since)
            self._marked = waited, self._bytes

    def forget(self) -> None:
        """Judge it anew."""
        self.lately = math.inf
