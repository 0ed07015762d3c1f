"""Reports in a run's events when its trainer lends its devices and has them back.

Invariant: changes are reported in order, each once, with the time since then. Those that are not reported yet are lost
with the process.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from ebbtide.claimed_runs.device_turns import HELD, LENT, device_event
from ebbtide.trainer.device_loan import TrainingDevice
from ebbtide.trainer.lending.enclosed_device import EnclosedDevice
from ebbtide.types.run import RunEvent


class _Change(NamedTuple):
    state: str
    at_s: float  # of the monotonic clock
    return_s: float


class ReportedDevice(EnclosedDevice):
    """A `TrainingDevice` around another one. `run` has to run meanwhile.

    `report` appends events to the run; `lineage` tells this trainer's events from those of others.
    """

    def __init__(
        self,
        device: TrainingDevice,
        report: Callable[[Sequence[RunEvent]], Awaitable[None]],
        *,
        lineage: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(device)
        self._report, self._lineage, self._clock = report, lineage, clock
        self._changes: asyncio.Queue[_Change] = asyncio.Queue()
        self._state = ""
        self._reported = 0

    def lend(self, spell_s: float = 0.0) -> None:
        self._device.lend(spell_s)
        self._changed(LENT)

    async def take_back(self, spell_s: float = 0.0, *, hand_over: bool = False) -> None:
        asked = self._clock()
        await self._device.take_back(spell_s, hand_over=hand_over)
        self._changed(HELD, self._clock() - asked)

    async def run(self) -> None:
        """Reports changes, forever."""
        while True:
            changes = [await self._changes.get()]
            while not self._changes.empty():
                changes.append(self._changes.get_nowait())
            await self._report([self._event(change) for change in changes])

    def _changed(self, state: str, return_s: float = 0.0) -> None:
        if state != self._state:
            self._state = state
            self._changes.put_nowait(_Change(state, self._clock(), return_s))

    def _event(self, change: _Change) -> RunEvent:
        self._reported += 1
        key = f"{self._lineage}.{self._reported}"
        return device_event(change.state, key=key, ago_s=self._clock() - change.at_s, return_s=change.return_s)
