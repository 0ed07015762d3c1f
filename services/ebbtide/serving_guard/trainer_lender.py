"""Lends the device of a trainer: the trainer computes its steps there, and between them the device is lent.

Invariant: one stream owns the device, the newest of the newest lease; the others are ended. A stream that ends leaves
the device to be lent, unless its owner comes back at once.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, Final

from ebbtide import telemetry
from ebbtide.errors import InvalidRequest, NotReady, Superseded
from ebbtide.gpu_memory import Device, open_device
from ebbtide.serving_guard.borrowers import AllowedMemory, BorrowerTable, Loan
from ebbtide.serving_guard.device_ownership import DeviceClaim, DeviceOwnership, OwnerLease
from ebbtide.serving_guard.lender import GrantIssuer, LeaseRecord, Lender, await_news, first_message
from ebbtide.serving_guard.loan_keeper import OWNERS_REFUSED, LoanKeeper, ReturnWatch
from ebbtide.serving_guard.servicer import LOANS, LoanServicer
from ebbtide.serving_guard.settings import GuardSettings
from ebbtide.types.grants import (
    LOANS_VERSION,
    BorrowerReport,
    DeviceStatus,
    GuardStatus,
    Hello,
    LoanState,
    OwnerWish,
    Residency,
)
from ebbtide.types.ids import check_id
from ebbtide.v1 import loans_pb2 as pb
from ebbtide.v1.loans_pb2_grpc import add_LoansServicer_to_server
from ebbtide.wire import from_proto, to_proto

log = telemetry.get_logger(__name__)

#: An owner whose stream broke reconnects within so long unless it is gone.
REJOIN_S: Final = 1.0


class TrainerLender(Lender):
    """Connects the parts. Trainer and workers connect at its address."""

    _keeper: LoanKeeper

    def __init__(self, settings: GuardSettings) -> None:
        folder, own = Path(settings.grant_dir), settings.trainer
        record = LeaseRecord(folder)
        self._began = time.monotonic()
        self._ownership = DeviceOwnership(
            self._began,
            settle_s=own.settle_s,
            silent_s=own.silent_s,
            rejoin_s=REJOIN_S,
            remembered=record.read(),
        )
        memory = PhasedMemory(own.residency, lambda: self._keeper.granting)
        borrowers = BorrowerTable(folder, memory)
        returns = ReturnWatch(folder, borrowers, own.residency)
        keeper = LoanKeeper(self._ownership, borrowers, returns, memory_s=own.memory_s)
        issuer = GrantIssuer(borrowers, memory=memory.allowed, forecast=keeper.forecast)
        owners = OwnerStream(self._ownership, keeper, memory, record)
        loans = (add_LoansServicer_to_server, LoanServicer(owners.serve, self.device_status), LOANS)
        super().__init__(settings, borrowers, keeper, issuer, [loans])

    def device_status(self) -> DeviceStatus:
        """What `WatchDevice` tells."""
        now, keeper, owner = time.monotonic(), self._keeper, self._ownership.owner
        return DeviceStatus(
            state=keeper.state,
            run_id=owner.run_id if owner else "",
            lease=owner.lease if owner else 0,
            compute_back=keeper.back.compute,
            memory_back=keeper.back.memory,
            waits_for=keeper.back.waits_for,
            borrowers=self._borrower_statuses(now),
            forecast=keeper.forecast(),
            held_s=keeper.seconds["held"],
            lent_s=keeper.seconds["lent"],
            take_backs=keeper.take_backs,
            uptime_s=now - self._began,
        )

    def status(self) -> GuardStatus:
        """The same for those who watch guards: a device whose trainer computes serves nobody."""
        now = time.monotonic()
        return GuardStatus(
            mode="trainer",
            state=self._keeper.state,
            borrowers=self._borrower_statuses(now),
            forecast=self._keeper.forecast(),
            uptime_s=now - self._began,
        )

    def _work(self) -> dict[str, Coroutine[Any, Any, None]]:
        return super()._work() | {"loans": self._keeper.run()}


#: How often the state is looked at: while the owner waits for its device, and otherwise.
_AWAITED_S: Final = 0.002
_LOOK_S: Final = 0.1
#: How often a state is repeated, as a sign of life: a trainer whose guard hangs looks into the pages itself.
_REPEAT_S: Final = 0.5


class _Owner:
    """One stream's claim and newest wish."""

    def __init__(self, claim: DeviceClaim, wish: OwnerWish) -> None:
        self.claim, self.wish = claim, wish
        self.news = asyncio.Event()


class OwnerStream:
    """Serves the streams of all owners: wishes, and what became of them. A servicer's `Own` is its `serve`."""

    def __init__(
        self, ownership: DeviceOwnership, keeper: LoanKeeper, memory: "PhasedMemory", record: LeaseRecord
    ) -> None:
        self._ownership, self._keeper, self._memory, self._record = ownership, keeper, memory, record

    async def serve(self, requests: AsyncIterator[pb.OwnerWish]) -> AsyncGenerator[pb.LoanState, None]:
        """Let one trainer own the device until its stream ends. Raises `InvalidRequest`, `NotReady`, `Superseded`."""
        first = await first_message(requests)
        if first is None:
            raise InvalidRequest("the owner states its wish first", field="sequence")
        owner = self._claim(from_proto(first, OwnerWish))
        reader = asyncio.create_task(self._read(requests, owner))
        try:
            told, told_at = None, 0.0
            while not reader.done():
                state = self._state(owner)
                if state != told or time.monotonic() - told_at >= _REPEAT_S:
                    told, told_at = state, time.monotonic()
                    yield to_proto(state, pb.LoanState)
                awaited = not owner.wish.lend and not state.memory_back
                await await_news(owner.news, reader, _AWAITED_S if awaited else _LOOK_S)
            reader.result()
        finally:
            reader.cancel()
            self._ownership.broke(time.monotonic(), owner.claim)
            log.info("the owner's stream ended", run_id=owner.wish.run_id, lease=owner.wish.lease)

    def _claim(self, wish: OwnerWish) -> _Owner:
        if wish.protocol_version != LOANS_VERSION:
            raise NotReady(f"this guard speaks version {LOANS_VERSION} of the loans, not {wish.protocol_version}")
        check_id(wish.run_id, field="run_id")
        if wish.pids:
            raise NotReady("this guard lends a trainer's device; for turns of several, start it with owner = turns")
        lease = OwnerLease(wish.run_id, wish.lease, wish.owner)
        try:
            claim = self._ownership.claim(time.monotonic(), lease, lends=wish.lend)
        except (Superseded, NotReady) as error:
            OWNERS_REFUSED.labels("superseded" if isinstance(error, Superseded) else "owned").inc()
            raise
        self._record.write(self._ownership.newest())
        log.info("the device has an owner", run_id=wish.run_id, lease=wish.lease)
        self._keeper.wished(wish.spell_s, hand_over=wish.hand_over)
        return _Owner(claim, wish)

    async def _read(self, requests: AsyncIterator[pb.OwnerWish], owner: _Owner) -> None:
        async for message in requests:
            wish, old = from_proto(message, OwnerWish), owner.wish
            if (wish.run_id, wish.lease, wish.owner) != (old.run_id, old.lease, old.owner):
                raise InvalidRequest("the owner stays the same for all of a stream; open another one", field="lease")
            if wish.sequence < old.sequence:
                raise InvalidRequest(f"must not fall; {old.sequence} was before", field="sequence")
            self._ownership.wish(time.monotonic(), owner.claim, lends=wish.lend)
            owner.wish = wish
            if wish.sequence > old.sequence:
                self._keeper.wished(wish.spell_s, hand_over=wish.hand_over)
                owner.news.set()

    def _state(self, owner: _Owner) -> LoanState:
        """What became of the newest wish. Raises `Superseded` if another stream owns the device."""
        self._ownership.check(owner.claim)
        wish, back = owner.wish, self._keeper.back
        return LoanState(
            sequence=wish.sequence,
            compute_back=back.compute and not wish.lend,
            memory_back=back.memory and not wish.lend,
            waits_for="" if wish.lend else back.waits_for,
            repeat_s=_REPEAT_S,
            engine_bytes=self._memory.engine_bytes(),
        )


_LENT: Final = "lent"
_HELD: Final = "held"
_CROWDED: Final = "crowded"
#: Share of a device's memory that stays free when an engine comes back: its steps allocate beyond its pool.
_RESERVE: Final = 0.02
#: While an engine waits for room, the reason is logged so often.
_TELL_S: Final = 30.0


class _Borrowing:
    def __init__(self, hello: Hello, device: Device | None) -> None:
        self.hello, self.device = hello, device
        self.residency = Residency.AWAKE if hello.slots else Residency.AWAY  # as its first report will say
        self.moving = False
        self.rising = False  # it was told to come to the device, and may be on its way
        self.told_at = float("-inf")


class PhasedMemory:
    """Says how much memory engines may use: all of theirs while the device is lent, and what the settings leave them
    while the trainer has it. `lent()`: whether engines have the device now. `held`: where weights are to be while they
    have not. An engine that is not booted yet has nothing there, and boots while the device is lent, whatever `held`
    is.

    An engine on a GPU comes back once the device has room for it: the trainer may still be moving its own memory away,
    or have kept it. Until then its grants leave the weights where they are, so that it does not fail on its way. What
    another engine was told to take, or takes, is no room for it.

    Invariant: the wish in a grant follows the present state of the device, but what an engine on its way has taken
    already does not turn it back. Memory that cannot be read counts as none.
    """

    def __init__(
        self,
        held: Residency,
        lent: Callable[[], bool],
        *,
        device: Callable[[str], Device] = open_device,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._held_at, self._lent, self._open, self._clock = held, lent, device, clock
        self._borrowers: dict[str, _Borrowing] = {}

    def joined(self, worker_id: str, hello: Hello) -> None:
        """Raises `InvalidRequest` for an engine whose device cannot be read, if it is to give memory up, or to boot."""
        reads = hello.device and (self._held_at is not Residency.AWAKE or not hello.slots)
        self._borrowers[worker_id] = _Borrowing(hello, self._open(hello.device) if reads else None)

    def left(self, worker_id: str) -> None:
        self._borrowers.pop(worker_id, None)

    def reported(self, now: float, worker_id: str, report: BorrowerReport) -> None:  # noqa: ARG002 - the interface
        """Raises `InvalidRequest` for an engine that is still to boot on a device that cannot be read."""
        if (borrower := self._borrowers.get(worker_id)) is not None:
            borrower.residency, borrower.moving = report.residency, report.moving
            boots = report.moving and not borrower.hello.slots  # maybe permitted by a former guard
            borrower.rising = (borrower.rising or boots) and report.residency is not Residency.AWAKE
            if borrower.device is None and borrower.hello.device and report.residency is not Residency.AWAKE:
                borrower.device = self._open(borrower.hello.device)

    def engine_bytes(self) -> int:
        """Of one device that the largest engine on a GPU needs to come back; 0: there is none, or none gives up."""
        return max((_needed(one.hello) for one in self._borrowers.values() if one.device is not None), default=0)

    def allowed(self, loan: Loan) -> AllowedMemory:
        """The memory in a borrower's next grant."""
        phase = _LENT if self._lent() else _HELD
        borrower = self._borrowers.get(loan.worker_id)
        at = borrower.residency if borrower is not None else Residency.AWAKE
        if self._held_at is Residency.AWAKE and at is Residency.AWAKE:
            return AllowedMemory(loan.hello.kv_bytes, phase, Residency.AWAKE)
        if phase is _HELD:
            if borrower is not None:
                borrower.rising = borrower.rising and borrower.moving  # a boot does not turn back
            return AllowedMemory(0, _HELD, max(at, self._held_at))
        if borrower is not None:
            borrower.rising = (borrower.rising and borrower.moving) or (
                at is not Residency.AWAKE and self._fits(borrower)
            )
            if at is not Residency.AWAKE and not borrower.rising:
                return AllowedMemory(0, _CROWDED, at)
        return AllowedMemory(loan.hello.kv_bytes, _LENT, Residency.AWAKE)

    def _fits(self, borrower: _Borrowing) -> bool:
        """Whether the device has room for the engine, and for those that are on their way there."""
        if borrower.device is None:
            return True
        beside = [one for one in self._borrowers.values() if one is not borrower and one.rising]
        needed, free, total = _needed(borrower.hello), 0, 0
        needed += sum(_needed(one.hello) for one in beside if one.hello.device == borrower.hello.device)
        try:
            free, total = borrower.device.memory()
        except Exception as error:  # noqa: BLE001 - whatever fails in NVML, the trainer goes on
            self._tell(borrower, needed, reason=str(error))
            return False
        fits = free >= needed + int(_RESERVE * total)
        if not fits:
            self._tell(borrower, needed, free=free)
        return fits

    def _tell(self, borrower: _Borrowing, needed: int, **facts: object) -> None:
        if self._clock() - borrower.told_at > _TELL_S:
            borrower.told_at = self._clock()
            log.warning("an engine waits for memory", worker_id=borrower.hello.worker_id, needed=needed, **facts)


def _needed(hello: Hello) -> int:
    return hello.weights_bytes + hello.kv_bytes
