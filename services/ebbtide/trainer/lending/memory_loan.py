"""Moves the trainer's memory off the device before it is lent, and back once it is the trainer's again.

Engines get the device when the move has ended. A take-back that comes during the move waits for it, and the device is
not lent at all. A loan that goes on moves memory again only if an engine that needs more has come meanwhile. If an
engine lacks room all the same, others may generate; if nobody does, the run ends after a while, and says what lacks.

Invariant: no step trains between a loan and the end of `take_back`. What is moved lives in `TrainerMemory`. The wish
dies with the process.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

from ebbtide.claimed_runs.run_loop import RunFailed
from ebbtide.errors import Unavailable
from ebbtide.trainer.device_loan import TrainingDevice
from ebbtide.trainer.learning.local_learning import LocalLearning
from ebbtide.trainer.lending.enclosed_device import EnclosedDevice
from ebbtide.types.work_left import WorkLeft

#: While the device is lent, engines that came meanwhile are looked for so often.
_LOOK_S: Final = 1.0
#: While an engine lacks room, the run's work is looked at so often, and may stand still for so long.
_WORK_LOOK_S: Final = 10.0
_PATIENCE_S: Final = 300.0


class MemoryLoan(EnclosedDevice):
    """A `TrainingDevice`. `run` has to run meanwhile."""

    def __init__(
        self,
        device: TrainingDevice,
        learning: LocalLearning,
        work_left: Callable[[], Awaitable[WorkLeft]],
        *,
        look_s: float = _LOOK_S,
        work_look_s: float = _WORK_LOOK_S,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        super().__init__(device)
        self._learning, self._work_left = learning, work_left
        self._look_s, self._work_look_s, self._patience_s = look_s, work_look_s, patience_s
        self._lacking = 0  # bytes, on this device, of an engine that needs `_room`
        self._seen: WorkLeft | None = None  # the work that was left at `_moved_at`, and still is
        self._moved_at = self._looked_at = 0.0
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
        """Move memory away before each loan, forever. Raises what a move raises, and `RunFailed` if nobody generates
        because an engine here lacks memory.
        """
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
            if not (self._lent and self._lacking):
                self._seen = None
            elif time.monotonic() - self._looked_at >= self._work_look_s:
                await self._look_at_work()

    async def _look_at_work(self) -> None:
        left = None
        with suppress(Unavailable):
            left = await self._work_left()
        now = self._looked_at = time.monotonic()
        if left is None or not left.open or self._seen is None or not _same(left, self._seen):
            self._seen, self._moved_at = left, now
        elif now - self._moved_at >= self._patience_s:
            raise RunFailed(
                f"no rollout of it got a token for {self._patience_s:g} s: the engine on the trainer's device needs "
                f"{self._room} bytes of it and lacks {self._lacking}; give the engine or the trainer less, give the "
                "host memory to which the trainer can move its own, or attach other workers"
            )

    async def _make_room(self) -> None:
        needed = self._device.engine_bytes()
        if self._spell_s is not None and (self._room is None or needed > self._room):
            self._room = needed
            self._lacking = await asyncio.to_thread(self._learning.give_up_memory, needed)


def _same(left: WorkLeft, before: WorkLeft) -> bool:
    """Whether nothing was generated in between."""
    return (left.groups, left.open, left.ended) == (before.groups, before.open, before.ended)
