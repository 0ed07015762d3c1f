"""Moves the trainer's memory off the device before it is lent, and back once it is the trainer's again.

Engines get the device when the move has ended. A take-back that comes during the move waits for it, and the device is
not lent at all. A loan that goes on moves memory again only if an engine that needs more has come meanwhile.

Invariant: no step trains between a loan and the end of `take_back`. What is moved lives in `TrainerMemory`. The wish
dies with the process.
"""

import asyncio
from contextlib import suppress
from typing import Final, Protocol

from ebbtide.trainer.device_loan import TrainingDevice
from ebbtide.trainer.lending.enclosed_device import EnclosedDevice

#: While the device is lent, engines that came meanwhile are looked for so often.
_LOOK_S: Final = 1.0


class MovableMemory(Protocol):
    """What trains on the device: see `LocalLearning`. Both block."""

    def give_up_memory(self, needed: int) -> None: ...

    def restore_memory(self) -> None: ...


class MemoryLoan(EnclosedDevice):
    """A `TrainingDevice`. `run` has to run meanwhile."""

    def __init__(self, device: TrainingDevice, learning: MovableMemory, *, look_s: float = _LOOK_S) -> None:
        super().__init__(device)
        self._learning, self._look_s = learning, look_s
        self._spell_s: float | None = None  # of the loan that is wanted; None: the trainer wants the device for itself
        self._lent = False
        self._room: int | None = None  # bytes that memory was given up for in this loan
        self._wished = asyncio.Event()
        self._moving = asyncio.Lock()

    def lend(self, spell_s: float = 0.0) -> None:
        self._spell_s = spell_s
        if self._lent:
            self._device.lend(spell_s)
        else:
            self._wished.set()

    async def take_back(self, spell_s: float = 0.0, *, hand_over: bool = False) -> None:
        self._spell_s = None
        async with self._moving:
            self._lent, self._room = False, None
            await self._device.take_back(spell_s, hand_over=hand_over)
            await asyncio.to_thread(self._learning.restore_memory)

    async def run(self) -> None:
        """Move memory away before each loan, forever. Raises what a move raises."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._look_s):
                    await self._wished.wait()
            self._wished.clear()
            async with self._moving:
                await self._make_room()
                if self._spell_s is not None and not self._lent:
                    self._lent = True
                    self._device.lend(self._spell_s)

    async def _make_room(self) -> None:
        needed = self._device.engine_bytes()
        if self._spell_s is not None and (self._room is None or needed > self._room):
            self._room = needed
            await asyncio.to_thread(self._learning.give_up_memory, needed)
