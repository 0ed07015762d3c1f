"""Bounds what ended runs keep of their past: beyond a number of bytes, those that ended first lose events and timeline.

Invariant: `_kept` has the ended runs that were swept by this coordinator. A new one sweeps all of them again, and so
learns them again. Records stay until they expire.
"""

import time
from typing import Final

from ebbtide import telemetry
from ebbtide.errors import StoreUnavailable
from ebbtide.store.store import Store
from ebbtide.store.topics.run_topic import EndedHistory
from ebbtide.store.unexpected_data import UNEXPECTED

log = telemetry.get_logger(__name__)


class EndedHistories:
    def __init__(self, store: Store, *, most_bytes: int, keep_s: float) -> None:
        """`most_bytes`: of all ended runs together; `keep_s`: seconds after which a record expires by itself."""
        self._store: Final = store
        self._most, self._keep_s = most_bytes, keep_s
        self._kept: dict[str, EndedHistory] = {}

    async def add(self, run_id: str) -> None:
        """Take in a run that has ended. Raises `StoreUnavailable`."""
        if (history := await self._store.runs.ended_history(run_id)) is not None:
            self._kept[run_id] = history

    async def bound(self) -> None:
        """Delete the oldest histories until the others fit. Raises `StoreUnavailable`."""
        expired = time.time() - self._keep_s
        self._kept = {run_id: one for run_id, one in self._kept.items() if one.ended > expired and one.size}
        total = sum(one.size for one in self._kept.values())
        for one in sorted(self._kept.values(), key=lambda one: one.ended):
            if total <= self._most:
                return
            del self._kept[one.run_id]
            total -= one.size
            try:
                await self._store.runs.drop_history(one.run_id)
            except UNEXPECTED as error:  # the next coordinator tries again
                log.error("history of an ended run not deleted", run_id=one.run_id, reason=str(error))  # noqa: TRY400 - the reason says all
            except StoreUnavailable:
                self._kept[one.run_id] = one
                raise
            else:
                log.info("history of an ended run deleted", run_id=one.run_id, bytes=one.size)
