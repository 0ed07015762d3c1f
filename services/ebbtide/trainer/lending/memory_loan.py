"""Moves the trainer's memory off the device before it is lent, and back once it is the trainer's again.

Engines get the device when the move has ended. A take-back that comes during the move waits for it, and the device is
not lent at all.

Invariant: no step trains between a loan and the end of `take_back`. What is moved lives in `TrainerMemory`.
"""

import asyncio
from typing import Protocol

from ebbtide.trainer.device_loan import TrainingDevice


class MovableMemory(Protocol):
    """What trains on the device: see `LocalLearning`. Both block."""

    def give_up_memory(self, needed: int) -> None: ...

    def restore_memory(self) -> None: ...


class MemoryLoan:
    """A `TrainingDevice`."""

    def __init__(self, device: TrainingDevice, learning: MovableMemory) -> None:
        self._device, self._learning = device, learning
        self._giving: asyncio.Task[None] | None = None
        self._wanted = True  # whether the trainer wants the device for itself

    def lend(self, spell_s: float = 0.0) -> None:
        self._wanted = False
        if self._giving is None or self._giving.done():
            self._giving = asyncio.create_task(self._give_up(spell_s))

    async def take_back(self, spell_s: float = 0.0, *, hand_over: bool = False) -> None:
        self._wanted = True
        giving, self._giving = self._giving, None
        if giving is not None:
            await giving
        await self._device.take_back(spell_s, hand_over=hand_over)
        await asyncio.to_thread(self._learning.restore_memory)

    def engines(self) -> frozenset[str]:
        return self._device.engines()

    def engine_bytes(self) -> int:
        return self._device.engine_bytes()

    async def _give_up(self, spell_s: float) -> None:
        await asyncio.to_thread(self._learning.give_up_memory, self._device.engine_bytes())
        if not self._wanted:
            self._device.lend(spell_s)
