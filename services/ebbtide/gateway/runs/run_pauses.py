"""Holds back new requests of runs that an operator paused.

Invariant: a pause ends by `resume`, or by itself after a bound. It is this process's alone: other gateways are paused
by themselves, and a restart ends it. Requests that are held back when the gateway leaves are refused.
"""

import asyncio
from typing import Final

from ebbtide.errors import Unavailable

#: A pause that nobody ends is over after so long.
LONGEST_S: Final = 3600.0


class RunPauses:
    """The paused runs."""

    def __init__(self, longest_s: float = LONGEST_S) -> None:
        self._longest_s = longest_s
        self._ends: dict[str, asyncio.Event] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._closed = False

    def is_paused(self, run_id: str) -> bool:
        return run_id in self._ends

    def pause(self, run_id: str) -> None:
        """Pause a run, or begin its bound again."""
        self._ends.setdefault(run_id, asyncio.Event())
        if timer := self._timers.pop(run_id, None):
            timer.cancel()
        self._timers[run_id] = asyncio.get_running_loop().call_later(self._longest_s, self.resume, run_id)

    def resume(self, run_id: str) -> None:
        if timer := self._timers.pop(run_id, None):
            timer.cancel()
        if end := self._ends.pop(run_id, None):
            end.set()

    async def passed(self, run_id: str) -> None:
        """Return when the run is not paused. Raises `Unavailable` if it still is when the gateway leaves."""
        while (end := self._ends.get(run_id)) is not None:
            await end.wait()
            if self._closed:
                raise Unavailable("this gateway is shutting down, and the run is paused; try again")

    def close(self) -> None:
        """Refuse what is held back. The pauses stay."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        for end in self._ends.values():
            end.set()
