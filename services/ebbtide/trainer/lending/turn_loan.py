"""Takes turns with other runs' trainers on a device: asks for it before a step, and gives it back with its memory.

The permission comes through the guard of the host (`ebbtide serve serving-guard --owner turns`), or of all hosts, whose
ranks move by one decision. Between turns the trainer's state is parked (`ebbtide.trainer.learning.parked_state`); the
process lives on, with its streams and what it has loaded.

Invariant: the state is on the device only within a turn. It is brought back after the guard's permission, and a turn is
given back once the state has left on all ranks. A training that fails in its turn parks its state before it gives up
the turn; one that cannot is killed by the guard. A trainer takes its first turn before it loads its model.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ebbtide import telemetry
from ebbtide.errors import EbbtideError
from ebbtide.grants import Page, seat_path
from ebbtide.trainer.lending.device_loan import TrainingDevice
from ebbtide.types.rollout import Trajectory

if TYPE_CHECKING:
    from ebbtide.trainer.learning.local_learning import LocalLearning

log = telemetry.get_logger(__name__)

#: Time for the state of a failed training to leave the device. A guard's patience with a broken stream is about it.
_LEAVE_S: Final = 30.0
#: Time for the guard to hear of the end of a turn.
_TOLD_S: Final = 1.0

_waits = telemetry.histogram("trainer_turn_wait_seconds", "a wait of a step for the trainer's turn on a shared device")
_turns = telemetry.histogram("trainer_turn_seconds", "turns of the trainer on a shared device")

Enough = Callable[[], bool]


class DeviceSeat:
    """This process's seat in the guard's folder, for as long as it lives: the guard may kill it in its turn."""

    def __init__(self, folder: Path) -> None:
        """Raises `InvalidRequest` if the folder cannot be used."""
        self._path = seat_path(folder, os.getpid())
        self._page = Page(self._path, create=True)

    def leave(self) -> None:
        self._page.remove(self._path)


class TurnLoan:
    """The turns of one training. `device`: a loan from the guard, which has to run meanwhile. `beside(work)`: runs work
    where the training computes, after what it computes now."""

    def __init__(self, device: TrainingDevice, beside: Callable[[Callable[[], object]], Awaitable[object]]) -> None:
        self._device, self._beside = device, beside
        self._learning: LocalLearning | None = None
        self._began: float | None = None  # the present turn
        self._told_by = 0.0  # when the guard knows that this trainer neither has nor wants a turn
        self.waited_s = self.restored_s = 0.0  # in the last `take`

    def learns(self, learning: "LocalLearning") -> None:
        """This is what leaves the device from now on. It was made within a turn."""
        self._learning = learning

    async def take(self) -> bool:
        """Return once it is this trainer's turn, and its state is on the device; whether it was not before. Raises
        `StateDamaged` if the state came back with other bytes."""
        if self._began is not None:
            return False
        asked = time.monotonic()
        try:
            await self._device.take_back()
        except BaseException:  # the turn may have begun meanwhile
            self._lend()
            raise
        self._began = time.monotonic()
        if self._learning is not None:
            await self._beside(self._learning.restore_memory)
        self.waited_s, self.restored_s = self._began - asked, time.monotonic() - self._began
        _waits.observe(self.waited_s)
        return True

    async def give_back(self) -> None:
        """Park the state, and let others have the device. Raises `RunFailed` if the state has no room elsewhere."""
        if self._began is None:
            return
        if self._learning is not None:
            await self._beside(self._learning.leave_device)
        _turns.observe(time.monotonic() - self._began)
        self._began = None
        self._lend()

    async def close(self) -> None:
        """End the turn of a training that is over, if it has one, and free what it has parked."""
        with suppress(EbbtideError, TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                await self.give_back()
                # On the stream, which ends then: a guard that is not told waits for this process, and kills it.
                await asyncio.sleep(self._told_by - time.monotonic())
                if self._learning is not None:  # other trainers may have the host's memory
                    await self._beside(self._learning.forget_parked)

    def _lend(self) -> None:
        self._device.lend()
        self._told_by = time.monotonic() + _TOLD_S


class TurnWindow:
    """A `TrainingWindow`: a step has the device once all its groups are there. `wait`: until there is enough."""

    def __init__(self, loan: TurnLoan, wait: Callable[[Enough], Awaitable[None]]) -> None:
        self._loan, self._wait = loan, wait

    async def open(self) -> None:
        """The turn goes on: a checkpoint may be due."""

    async def close(self, whole: Enough) -> None:
        await self._wait(whole)
        await self._loan.take()

    async def groups(self, enough: Enough, whole: Enough) -> None:  # noqa: ARG002 - the other kinds need it
        await self._wait(enough)

    async def hold(self) -> bool:
        return await self._loan.take()

    async def rest(self) -> None:
        await self._loan.give_back()

    def trained(self, trajectories: Iterable[Trajectory], *, learning_s: float) -> dict[str, float]:  # noqa: ARG002
        return {"turn_wait_s": self._loan.waited_s, "turn_restore_s": self._loan.restored_s}
