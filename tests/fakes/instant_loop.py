"""An event loop in which waiting takes no time."""

import asyncio
import selectors
from typing import Any


class _Instant(selectors.DefaultSelector):
    """Waits for nothing: the time that a loop would have waited has passed."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        self.now += max(0.0, timeout or 0.0)
        return super().select(0)


class InstantLoop(asyncio.SelectorEventLoop):
    """Its `time` begins at 0 and passes only while everybody waits."""

    def __init__(self) -> None:
        self._instant = _Instant()
        super().__init__(self._instant)

    def time(self) -> float:
        return self._instant.now
