"""Lends the trainer's device between its steps, and takes it back before the next, through the guard of the host.

The owner states its wish and repeats it as a sign of life; the guard answers what became of it. A step begins once no
engine computes and all have given up memory. While there is no guard, or it hangs, permissions to compute expire by
themselves, and the trainer looks into the pages: it begins soon if no engine is there, and after a while if none
computes or may. A new guard lends nothing until the trainer had the time to state its wish again.

Invariant: the wish is stated again on each new stream, with the same lease. It dies with the process, and the device is
lent until a trainer takes it back.

`ReportedDevice` reports in a run's events when its trainer lends its devices and has them back. Changes are reported in
order, each once, with the time since then. Those that are not reported yet are lost with the process.

`MemoryLoan` moves the trainer's memory off the device before it is lent, and back once it is the trainer's again.
Engines get the device when the move has ended. A take-back that comes during the move waits for it, and the device is
not lent at all. A loan that continues moves memory again only if an engine that needs more has come meanwhile. If an
engine lacks memory all the same, others may generate; if nobody does, the run ends after a while, and says what lacks.
No step trains between a loan and the end of `take_back`. What is moved lives in `TrainerMemory`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from msgspec import Struct
from msgspec.structs import replace

from ebbtide import telemetry
from ebbtide.errors import EbbtideError, InvalidRequest, LeaseSuperseded, Superseded, Unavailable
from ebbtide.grants import Page, socket_path
from ebbtide.rpc.backoff import pauses
from ebbtide.rpc.channel import open_socket, write
from ebbtide.rpc.status_table import translated
from ebbtide.run_client import RunFailed
from ebbtide.runtime import race
from ebbtide.types.device_turns import HELD, LENT, device_event
from ebbtide.types.grants import LOANS_VERSION, LoanState, OwnerWish
from ebbtide.types.ids import new_fence
from ebbtide.types.remaining_work import RemainingWork
from ebbtide.types.run import RunEvent
from ebbtide.v1 import loans_pb2
from ebbtide.v1.loans_pb2_grpc import LoansStub
from ebbtide.wire import from_proto, to_proto

if TYPE_CHECKING:
    from ebbtide.trainer.learning.local_learning import LocalLearning

log = telemetry.get_logger(__name__)

#: Interval of signs of life. The guard believes in an owner for several of them.
_LIFE_S: Final = 1.0
#: Without a guard for so long, the pages tell whether a step may begin. A supervised one is back before.
_ALONE_S: Final = 10.0
#: Without a guard and any engine for so long, a step begins: one that is started beside the trainer had time.
_EMPTY_S: Final = 1.0
#: A guard that repeats its state hangs if nothing came for so many of its intervals, and at least so long.
_MISSED: Final = 6
_HANGS_S: Final = 3.0
_LOOK_S: Final = 0.05
#: While a step waits for the device, the reason is logged so often.
_TELL_S: Final = 20.0
#: Longest pause before another try: an owner that is away for a second counts as gone, and its device is lent.
_LONGEST_PAUSE_S: Final = 0.4
#: After a stream of this length, the next one opens soon.
_LONG_S: Final = 10.0
#: What a trainer that takes turns waits for at a guard which answers, and never gives one.
_NO_TURNS: Final = "a guard that knows turns: start the serving-guard of this release with owner = turns"

_waits = telemetry.histogram(
    "trainer_take_back_seconds", "with `generate`: a wait of a step for the device, from its take-back on"
)


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

    def engines(self) -> frozenset[str]:
        """The workers whose engines run on it: those with pages beside a guard's socket."""
        ...

    def engine_bytes(self) -> int:
        """Of the device that an engine needs to come back; 0: none, or unknown."""
        ...


class OwnDevice:
    """The device of a trainer that lends nothing."""

    def lend(self, spell_s: float = 0.0) -> None:
        """No engine borrows here."""

    async def take_back(self, spell_s: float = 0.0, *, hand_over: bool = False) -> None:
        """It was never lent."""

    def engines(self) -> frozenset[str]:
        return frozenset()

    def engine_bytes(self) -> int:
        return 0


class DeviceProgress(Struct, frozen=True, kw_only=True):
    """What became of the newest wish to take a device back."""

    compute_back: bool = False
    memory_back: bool = False
    waits_for: str = ""
    apart_s: float = 0.0  # for which no guard has served this trainer
    engine_bytes: int = 0  # of the device that an engine needs to come back; 0: none, or unknown

    @property
    def back(self) -> bool:
        """Whether the device is the trainer's alone."""
        return self.compute_back and self.memory_back


class DeviceLoan:
    """The device of a trainer that lends it. `run` has to run meanwhile."""

    def __init__(
        self,
        folder: Path,
        *,
        run_id: str,
        lease: int,
        owner: str = "",
        pids: Sequence[int] = (),
        priority: int = 0,
    ) -> None:
        """`folder`: of the guard's socket and the engines' pages. `lease`: number of the run's trainer lease.
        `owner`: the fence of the process that holds it; empty: this one. `pids`: the trainer's processes on this host,
        if it takes turns with others, with this `priority`. Then a wish to lend gives the turn back, and without a
        guard no step begins: nobody else knows whose turn it is."""
        self._folder, self._target = folder, socket_path(folder)
        self.wish = OwnerWish(
            protocol_version=LOANS_VERSION,
            run_id=run_id,
            owner=owner or new_fence(),
            lease=lease,
            lend=bool(pids),  # a turn is asked for
            pids=tuple(pids),
            priority=priority,
        )
        self._given_back: OwnerWish | None = None  # ended a turn, and may not be stated yet
        self.answered = asyncio.Event()  # set at each message of the guard
        self._stated = asyncio.Event()  # set when a wish is to be stated at once
        self._state = LoanState(sequence=-1)
        self._heard_at = time.monotonic()
        self._alone_since: float | None = None
        self._apart_since: float | None = self._heard_at
        self._reason = "no guard has answered yet"

    def lend(self, spell_s: float = 0.0) -> None:
        self.want(self.next_wish(lend=True, spell_s=spell_s))

    async def take_back(self, spell_s: float = 0.0, *, hand_over: bool = False) -> None:
        self.want(self.next_wish(lend=False, spell_s=spell_s, hand_over=hand_over))
        began = told = time.monotonic()
        while not (progress := self.progress()).back:
            if time.monotonic() - told > _TELL_S:
                told = time.monotonic()
                log.warning("waiting for the device", reason=progress.waits_for)
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self.answered.wait()
            self.answered.clear()
        if progress.apart_s:
            log.warning("no engine computes: the step begins", without=progress.waits_for)
        _waits.observe(time.monotonic() - began)

    def next_wish(self, *, lend: bool, spell_s: float, hand_over: bool = False) -> OwnerWish:
        number = self.wish.sequence + 1
        return replace(self.wish, sequence=number, lend=lend, spell_s=spell_s, hand_over=hand_over)

    def want(self, wish: OwnerWish) -> None:
        """State this wish from now on. Its sequence is higher than that of the former one."""
        if wish.pids and wish.lend:
            self._given_back = wish
        self.wish = wish
        self._stated.set()

    def engines(self) -> frozenset[str]:
        return frozenset(path.stem for path in _pages(self._folder))

    def engine_bytes(self) -> int:
        return self._state.engine_bytes

    @property
    def turn(self) -> int:
        """Number of this trainer's turn; 0: it has none, or takes none."""
        return self._state.turn if self.progress().back else 0

    def progress(self) -> DeviceProgress:
        """What became of the newest wish, if it takes the device back."""
        state, needed = self._state, self._state.engine_bytes
        if state.sequence == self.wish.sequence and not self._hangs():
            holds = not self.wish.pids or time.monotonic() < self._heard_at + state.expires_s
            turnless = self.wish.pids and state.compute_back and not state.turn
            return DeviceProgress(
                compute_back=state.compute_back and holds,
                memory_back=state.memory_back and holds,
                waits_for=_NO_TURNS if turnless else state.waits_for,
                engine_bytes=needed,
            )
        if self._alone():
            stands = _free(self._folder)
            return DeviceProgress(
                compute_back=stands,
                memory_back=stands,
                waits_for=f"the guard of the device ({self._reason or 'it hangs'})",
                apart_s=self._apart_s(),
                engine_bytes=needed,
            )
        return DeviceProgress(
            waits_for=self._reason or "an answer of the device's guard", apart_s=self._apart_s(), engine_bytes=needed
        )

    async def run(self) -> None:
        """Keep a stream to the guard, forever. Raises `LeaseSuperseded` if a newer lease owns the device."""
        waits = pauses(0.05, _LONGEST_PAUSE_S)
        while True:
            began = time.monotonic()
            try:
                with translated("serving-guard", str(self._target)):
                    await self._own()
            except Superseded as error:
                raise LeaseSuperseded(str(error)) from None
            except EbbtideError as error:
                self._apart(str(error), alone=isinstance(error, Unavailable))
            if time.monotonic() - began > _LONG_S:
                waits = pauses(0.05, _LONGEST_PAUSE_S)
            await asyncio.sleep(next(waits))

    async def _own(self) -> None:
        async with open_socket(self._target) as channel:
            call = LoansStub(channel).Own()
            try:
                await race(self._state_wishes(call), self._receive(call))
            finally:
                call.cancel()
                self._state = LoanState(sequence=-1, engine_bytes=self._state.engine_bytes)

    async def _state_wishes(self, call: Any) -> None:
        while True:
            self._stated.clear()
            if (before := self._given_back) is not None and before.sequence < self.wish.sequence:
                await write(call, to_proto(before, loans_pb2.OwnerWish))  # or others would not have their turn
            self._given_back = None
            await write(call, to_proto(self.wish, loans_pb2.OwnerWish))
            with suppress(TimeoutError):
                async with asyncio.timeout(_LIFE_S):
                    await self._stated.wait()

    async def _receive(self, call: Any) -> None:
        async for message in call:
            if self._apart_since is not None:
                log.info("the device has a guard", target=str(self._target))
            self._alone_since = self._apart_since = None
            self._reason, self._heard_at = "", time.monotonic()
            self._state = from_proto(message, LoanState)
            self.answered.set()
        raise Unavailable("the guard ended the stream")

    def _apart(self, reason: str, *, alone: bool) -> None:
        """Log each reason once: a guard may well be away for long. `alone`: there is none. One that refuses knows
        another owner of the device."""
        now = time.monotonic()
        self._alone_since = (self._alone_since or now) if alone else None
        self._apart_since = self._apart_since or now
        if reason != self._reason:
            log.warning("without a guard", reason=reason)
            self._reason = reason

    def _apart_s(self) -> float:
        since = self._heard_at if self._hangs() else self._apart_since
        return 0.0 if since is None else time.monotonic() - since

    def _hangs(self) -> bool:
        silent_s, repeat_s = time.monotonic() - self._heard_at, self._state.repeat_s
        return repeat_s > 0 and silent_s > max(_HANGS_S, _MISSED * repeat_s)

    def _alone(self) -> bool:
        """Whether the pages alone tell if a step may begin."""
        if self.wish.pids:
            return False
        if self._hangs():
            return True
        if self._alone_since is None:
            return False
        alone_s = time.monotonic() - self._alone_since
        return alone_s > _ALONE_S or (alone_s > _EMPTY_S and not any(map(_inhabited, _pages(self._folder))))


def _pages(folder: Path) -> list[Path]:
    return list(folder.glob("*.page"))


def _free(folder: Path) -> bool:
    """Whether no engine of the folder computes, or may."""
    return all(map(_still, _pages(folder)))


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


def _inhabited(path: Path) -> bool:
    """Whether an engine may live there: one that boots has not entered its page yet."""
    try:
        page = Page(path)
    except InvalidRequest:
        return False
    try:
        pid = page.steps().pid
        return not pid or Path(f"/proc/{pid}").exists()
    finally:
        page.close()


class _EnclosedDevice:
    """Half of a `TrainingDevice`: what the inner one says of its engines. Classes that derive from it lend and take
    back.
    """

    def __init__(self, device: TrainingDevice) -> None:
        self._device = device

    def engines(self) -> frozenset[str]:
        return self._device.engines()

    def engine_bytes(self) -> int:
        return self._device.engine_bytes()


class _Change(NamedTuple):
    state: str
    at_s: float  # of the monotonic clock
    return_s: float


class ReportedDevice(_EnclosedDevice):
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


#: While the device is lent, engines that came meanwhile are looked for so often.
_ENGINES_LOOK_S: Final = 1.0
#: While an engine lacks room, the run's work is looked at so often, and may stand still for so long.
_WORK_LOOK_S: Final = 10.0
_PATIENCE_S: Final = 300.0


class MemoryLoan(_EnclosedDevice):
    """A `TrainingDevice`. `run` has to run meanwhile."""

    def __init__(
        self,
        device: TrainingDevice,
        learning: "LocalLearning",
        remaining_work: Callable[[], Awaitable[RemainingWork]],
        *,
        look_s: float = _ENGINES_LOOK_S,
        work_look_s: float = _WORK_LOOK_S,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        super().__init__(device)
        self._learning, self._remaining_work = learning, remaining_work
        self._look_s, self._work_look_s, self._patience_s = look_s, work_look_s, patience_s
        self._lacking = 0  # bytes, on this device, of an engine that needs `_room`
        self._seen: RemainingWork | None = None  # the work that was left at `_moved_at`, and still is
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
            left = await self._remaining_work()
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


def _same(left: RemainingWork, before: RemainingWork) -> bool:
    """Whether nothing was generated in between."""
    return (left.groups, left.open, left.ended) == (before.groups, before.open, before.ended)
