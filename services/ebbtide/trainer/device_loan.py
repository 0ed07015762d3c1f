"""Lends the trainer's device between its steps, and takes it back before the next, through the arbiter of the host.

The owner states its wish and repeats it as a sign of life; the arbiter answers what became of it. A step begins once no
engine computes and all have given up memory. While there is no arbiter, permissions to compute expire by themselves:
after a while the trainer looks into the pages, and begins if no engine computes or may. A new arbiter lends nothing
until the trainer had the time to state its wish again.

Invariant: the wish is stated again on each new stream, with the same lease. It dies with the process, and the device is
lent until a trainer takes it back.
"""

import asyncio
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

from msgspec.structs import replace

from ebbtide import telemetry
from ebbtide.errors import EbbtideError, InvalidRequest, LeaseSuperseded, Superseded, Unavailable
from ebbtide.grants import Page, socket_path
from ebbtide.rpc.backoff import pauses
from ebbtide.rpc.channel import open_socket, write
from ebbtide.rpc.status_table import translated
from ebbtide.runtime import race
from ebbtide.types.ids import new_fence
from ebbtide.types.loans import LOANS_VERSION, LoanState, OwnerWish
from ebbtide.v1 import loans_pb2
from ebbtide.v1.loans_pb2_grpc import LoansStub
from ebbtide.wire.record_conversion import from_proto, to_proto

log = telemetry.get_logger(__name__)

#: Interval of signs of life. The arbiter believes in an owner for several of them.
_LIFE_S: Final = 1.0
#: Without an arbiter for so long, the pages tell whether a step may begin. A supervised one is back before.
_ALONE_S: Final = 10.0
_LOOK_S: Final = 0.05
#: While a step waits for the device, the reason is logged so often.
_TELL_S: Final = 20.0
#: After a stream of this length, the next one opens soon.
_LONG_S: Final = 10.0

_waits = telemetry.histogram("trainer_take_back_seconds", "A step's wait for the device, from its take-back on")


class TrainingDevice(Protocol):
    """The device of a trainer."""

    def lend(self, spell_s: float = 0.0) -> None:
        """Engines may have it from now on, probably for `spell_s`; 0: unknown."""
        ...

    async def take_back(self, spell_s: float = 0.0, *, hand_over: bool = False) -> None:
        """Return once it is the trainer's alone, probably for `spell_s`; 0: unknown. `hand_over`: what its engines run
        is to go on elsewhere at once.
        """
        ...


class OwnDevice:
    """The device of a trainer that lends nothing."""

    def lend(self, spell_s: float = 0.0) -> None:
        """No engine borrows here."""

    async def take_back(self, spell_s: float = 0.0, *, hand_over: bool = False) -> None:
        """It was never lent."""


class DeviceLoan:
    """The device of a trainer that lends it. `run` has to run meanwhile."""

    def __init__(self, folder: Path, *, run_id: str, lease: int) -> None:
        """`folder`: of the arbiter's socket and the engines' pages. `lease`: number of the run's trainer lease."""
        self._folder, self._target = folder, socket_path(folder)
        self._wish = OwnerWish(protocol_version=LOANS_VERSION, run_id=run_id, owner=new_fence(), lease=lease)
        self._stated = asyncio.Event()  # set when a wish is to be stated at once
        self._state = LoanState(sequence=-1)
        self._answered = asyncio.Event()
        self._alone_since: float | None = time.monotonic()
        self._reason = "no arbiter has answered yet"

    def lend(self, spell_s: float = 0.0) -> None:
        self._want(lend=True, spell_s=spell_s)

    async def take_back(self, spell_s: float = 0.0, *, hand_over: bool = False) -> None:
        self._want(lend=False, spell_s=spell_s, hand_over=hand_over)
        began = told = time.monotonic()
        while not self._back():
            if self._alone() and self._stands():
                log.warning("no arbiter, but no engine computes: the step begins", reason=self._reason)
                break
            if time.monotonic() - told > _TELL_S:
                told = time.monotonic()
                log.warning("waiting for the device", reason=self._reason or self._state.waits_for)
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._answered.wait()
            self._answered.clear()
        _waits.observe(time.monotonic() - began)

    async def run(self) -> None:
        """Keep a stream to the arbiter, forever. Raises `LeaseSuperseded` if a newer lease owns the device."""
        waits = pauses(0.05, 1.0)
        while True:
            began = time.monotonic()
            try:
                with translated("device-arbiter", str(self._target)):
                    await self._own()
            except Superseded as error:
                raise LeaseSuperseded(str(error)) from None
            except EbbtideError as error:
                self._apart(str(error), alone=isinstance(error, Unavailable))
            if time.monotonic() - began > _LONG_S:
                waits = pauses(0.05, 1.0)
            await asyncio.sleep(next(waits))

    def _want(self, *, lend: bool, spell_s: float, hand_over: bool = False) -> None:
        number = self._wish.sequence + 1
        self._wish = replace(self._wish, sequence=number, lend=lend, spell_s=spell_s, hand_over=hand_over)
        self._stated.set()

    def _back(self) -> bool:
        state = self._state
        return state.sequence == self._wish.sequence and state.compute_back and state.memory_back

    async def _own(self) -> None:
        async with open_socket(self._target) as channel:
            call = LoansStub(channel).Own()
            try:
                await race(self._state_wishes(call), self._receive(call))
            finally:
                call.cancel()
                self._state = LoanState(sequence=-1)

    async def _state_wishes(self, call: Any) -> None:
        while True:
            self._stated.clear()
            await write(call, to_proto(self._wish, loans_pb2.OwnerWish))
            with suppress(TimeoutError):
                async with asyncio.timeout(_LIFE_S):
                    await self._stated.wait()

    async def _receive(self, call: Any) -> None:
        async for message in call:
            if self._alone_since is not None:
                log.info("the device has an arbiter", target=str(self._target))
            self._alone_since, self._reason = None, ""
            self._state = from_proto(message, LoanState)
            self._answered.set()
        raise Unavailable("the arbiter ended the stream")

    def _apart(self, reason: str, *, alone: bool) -> None:
        """Log each reason once: an arbiter may well be away for long. `alone`: there is none. One that refuses knows
        another owner of the device."""
        if not alone:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = time.monotonic()
        if reason != self._reason:
            log.warning("without an arbiter", reason=reason)
            self._reason = reason

    def _alone(self) -> bool:
        return self._alone_since is not None and time.monotonic() - self._alone_since > _ALONE_S

    def _stands(self) -> bool:
        """Whether no engine of the folder computes, or may."""
        return all(_still(path) for path in self._folder.glob("*.page"))


def _still(path: Path) -> bool:
    try:
        page = Page(path)
    except InvalidRequest:  # its worker has left meanwhile
        return True
    try:
        steps = page.steps()
        return not page.offered().tokens and not (steps.stepping and Path(f"/proc/{steps.pid}").exists())
    finally:
        page.close()
