"""Remembers the ended runs that this relay has heard of.

Invariant: a run is here only if its coordinator, or an upstream that heard the coordinator, has said that it ended. It
is forgotten after `REMEMBERED_S`, or when it lives again; the relay takes nothing of it meanwhile. The record dies with
the process: the next one asks about the runs that it finds.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from ebbtide.errors import LeaseSuperseded
from ebbtide.rpc.run_endings import EndedRun, RunEndings

#: Longer than any caller goes on publishing or reading an ended run.
REMEMBERED_S: Final = 3600.0
_MOST: Final = 100_000


class EndedRuns:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._runs: OrderedDict[str, tuple[EndedRun, float]] = OrderedDict()
        self.endings = RunEndings()

    def __contains__(self, run_id: str) -> bool:
        return run_id in self._runs

    def add(self, run: EndedRun) -> bool:
        """Remember an ended run and tell the listeners; False if it was known."""
        now = self._clock()
        while self._runs and (len(self._runs) >= _MOST or next(iter(self._runs.values()))[1] < now - REMEMBERED_S):
            self._runs.popitem(last=False)
        if run.run_id in self._runs:
            return False
        self._runs[run.run_id] = run, now
        self.endings.tell(run)
        return True

    def lives(self, run_id: str) -> None:
        """Forget that the run has ended: another one lives under its id."""
        self._runs.pop(run_id, None)

    def known(self, run_ids: tuple[str, ...]) -> tuple[EndedRun, ...]:
        return tuple(self._runs[run_id][0] for run_id in run_ids if run_id in self._runs)

    def refuse(self, run_id: str) -> None:
        """Raises `LeaseSuperseded` for a run that has ended."""
        if run_id in self._runs:
            status = self._runs[run_id][0].status.name.lower()
            raise LeaseSuperseded(f"run {run_id} has ended ({status}); step down")
