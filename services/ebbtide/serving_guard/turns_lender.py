"""Lets the trainers of several runs take turns on a device: asks, permissions that expire, and a ledger of all turns.

Trainers connect at the socket in the folder of grants, and keep a stream each (`Loans.Own`). The decision is
`TurnOrder`'s; here are its deeds. A trainer that loses its turn is killed with all its processes on this host, and the
next turn begins when none of them is left: a frozen one cannot wake up in the turn of another. Whoever supervises it
starts it again, and it resumes from its checkpoint.

Invariant: a turn is in the ledger before its trainer is told of it, and its end before the next one begins. So a new
guard knows whose turn it is, waits for that trainer as for one whose stream broke, and kills it if it stays away.
Permissions end by themselves if the guard dies. A trainer in the middle of its step goes on then, as nobody else gets
a turn.
"""

import asyncio
import os
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from ebbtide import telemetry
from ebbtide.auth.security import ServerSettings
from ebbtide.errors import InvalidRequest, NotReady
from ebbtide.grants import seat_path, socket_path
from ebbtide.rpc.server import Server, Service
from ebbtide.runtime import Shutdown
from ebbtide.serving_guard import borrower_processes
from ebbtide.serving_guard.borrower_processes import BorrowerProcess
from ebbtide.serving_guard.device_ownership import DeviceClaim, OwnerLease
from ebbtide.serving_guard.lender import LeaseRecord, await_news, first_message
from ebbtide.serving_guard.servicer import GRANTS, LOANS, GrantServicer, LoanServicer
from ebbtide.serving_guard.settings import GuardSettings
from ebbtide.serving_guard.turn_order import Seat, Turn, TurnOrder, TurnTrainer
from ebbtide.telemetry import rpc_observer
from ebbtide.types.grants import LOANS_VERSION, Borrower, DeviceStatus, GuardStatus, LoanState, OwnerWish
from ebbtide.types.ids import check_id
from ebbtide.v1 import grants_pb2, loans_pb2
from ebbtide.v1.grants_pb2_grpc import add_GrantsServicer_to_server
from ebbtide.v1.loans_pb2_grpc import add_LoansServicer_to_server
from ebbtide.wire import from_proto, to_proto

log = telemetry.get_logger(__name__)

#: How often processes and silences are looked at. Wishes are followed at once.
_LOOK_S: Final = 0.05
#: How often a state is repeated, and for how long a permission holds: two of three repeats may come late.
_REPEAT_S: Final = 0.5
_EXPIRES_S: Final = 2.0
_GRACE_S: Final = 0.5
#: Bytes of the ledger after which it is begun anew; the former one stays beside it.
_LEDGER_BYTES: Final = 1 << 20
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_WAITS = (0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)

TURNS = telemetry.counter(
    "guard_turns_total", "turns of trainers on a shared device that ended; `outcome`: given_back, lost", ("outcome",)
)
TURN_SECONDS = telemetry.histogram("guard_turn_seconds", "turns of trainers on a shared device", (), _WAITS)
WAIT_SECONDS = telemetry.histogram(
    "guard_turn_wait_seconds", "a trainer's wait for its turn on a shared device", (), _WAITS
)
QUEUE = telemetry.gauge("guard_turn_queue", "trainers that wait for a shared device")
HELD = telemetry.gauge("guard_turn_held", "1 while a trainer has its turn on a shared device, else 0")


class TurnRecord(Struct, frozen=True, kw_only=True):
    """A line of the ledger: a turn began, or ended."""

    boot: str  # of the host
    at_s: float  # of the monotonic clock, which all lives of a boot share
    turn: int
    began: bool
    run_id: str
    lease: int
    owner: str
    seats: tuple[Seat, ...] = ()
    reason: str = ""  # why it ended, for people


def ledger_path(folder: Path) -> Path:
    return folder / "turns.jsonl"


def read_turns(folder: Path) -> list[TurnRecord]:
    """The ledger's lines of this boot of the host, in order. Lines that cannot be read are left out: that is the last
    one, which a guard did not finish when it died, and nobody was told of."""
    boot, found = _BOOT.read_text().strip(), []
    path = ledger_path(folder)
    lines: list[bytes] = []
    for part in (path.with_suffix(".old"), path):
        with suppress(FileNotFoundError):
            lines += part.read_bytes().splitlines()
    for line in lines:
        with suppress(msgspec.MsgspecError):
            found.append(msgspec.json.decode(line, type=TurnRecord))
    return [record for record in found if record.boot == boot]


class TurnLedger:
    """Writes the ledger."""

    def __init__(self, folder: Path) -> None:
        self._path, self._boot = ledger_path(folder), _BOOT.read_text().strip()

    def write(self, now: float, turn: Turn, *, began: bool, reason: str = "") -> None:
        """Raises `OSError`."""
        lease = turn.trainer.lease
        record = TurnRecord(
            boot=self._boot,
            at_s=now,
            turn=turn.number,
            began=began,
            run_id=lease.run_id,
            lease=lease.lease,
            owner=lease.owner,
            seats=turn.trainer.seats,
            reason=reason,
        )
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if began and os.fstat(descriptor).st_size > _LEDGER_BYTES:
                self._path.rename(self._path.with_suffix(".old"))
                return self.write(now, turn, began=began, reason=reason)
            line = b"\n" + msgspec.json.encode(record)  # ends a line that was not finished
            if os.write(descriptor, line) != len(line):
                raise OSError(28, "the line was cut")
        finally:
            os.close(descriptor)


def unfinished(records: Iterable[TurnRecord]) -> Turn | None:
    """The turn that has not ended by the ledger."""
    found: Turn | None = None
    for record in records:
        lease = OwnerLease(record.run_id, record.lease, record.owner)
        trainer = TurnTrainer(lease=lease, seats=record.seats)
        found = Turn(number=record.turn, trainer=trainer, began=record.at_s) if record.began else None
    return found


class _Stream:
    """One trainer's connection."""

    def __init__(self, claim: DeviceClaim, wish: OwnerWish, trainer: TurnTrainer) -> None:
        self.claim, self.wish, self.trainer = claim, wish, trainer
        self.news = asyncio.Event()
        self.asked_at = time.monotonic()


class TurnsLender:
    """Connects the parts. Trainers connect at its address."""

    def __init__(self, settings: GuardSettings) -> None:
        self._folder, own = Path(settings.grant_dir), settings.turns
        self._record, self._ledger = LeaseRecord(self._folder), TurnLedger(self._folder)
        records = read_turns(self._folder)
        self._began = self._looked_at = time.monotonic()
        self._order = TurnOrder(
            self._began,
            silent_s=own.silent_s,
            rejoin_s=own.rejoin_s,
            turn_s=own.turn_s,
            number=max((record.turn for record in records), default=0),
            turn=unfinished(records),
        )
        self._order.remember(self._record.read(), self._began)
        self._streams: set[_Stream] = set()
        self._changed = asyncio.Event()
        self._killed = 0  # number of the turn whose trainer was killed
        self._lost = self._given = 0
        self._held_s = 0.0
        self._closed = False
        self._unwritten = ""  # why the ledger cannot be written
        loans: Service = (add_LoansServicer_to_server, LoanServicer(self.serve, self.device_status), LOANS)
        grants: Service = (add_GrantsServicer_to_server, GrantServicer(_no_borrower, self.status), GRANTS)
        self.services: list[Service] = [grants, loans]
        socket = socket_path(self._folder).absolute()
        self._server = Server(ServerSettings.at(f"unix:{socket}"), self.services, observe=rpc_observer(), private=True)

    @property
    def address(self) -> str:
        return self._server.address

    def status(self) -> GuardStatus:
        """What `WatchGuard` tells."""
        now, turn = time.monotonic(), self._order.turn
        queue = [one.lease.run_id for one in self._order.queue(now)]
        states = {turn.trainer.lease.run_id: "its turn"} if turn is not None else {}
        states |= dict.fromkeys(queue, "waits")
        states |= {one.wish.run_id: "parked" for one in self._streams if one.wish.run_id not in states}
        return GuardStatus(
            mode="turns",
            state=self._state(),
            waiting=len(queue),
            borrowers=tuple(Borrower(worker_id=run_id, state=state) for run_id, state in states.items()),
            uptime_s=now - self._began,
        )

    def device_status(self) -> DeviceStatus:
        """What `WatchDevice` tells."""
        now, turn = time.monotonic(), self._order.turn
        return DeviceStatus(
            state=self._state(),
            run_id=turn.trainer.lease.run_id if turn else "",
            lease=turn.trainer.lease.lease if turn else 0,
            waits_for=self._order.lost or self._unwritten,
            held_s=self._held_s,
            take_backs=self._given,
            uptime_s=now - self._began,
            turn=self._order.number,
            queue=tuple(one.lease.run_id for one in self._order.queue(now)),
            lost=self._lost,
        )

    async def start(self, shutdown: Shutdown) -> None:
        self._sweep_seats()
        self._review()
        await self._server.start()
        shutdown.spawn(self._run(), "turns")
        await self._server.set_serving(True)

    async def stop(self) -> None:
        """Trainers wait until the next guard is there. The one in its turn goes on."""
        self._closed = True
        await self._server.stop(_GRACE_S)

    async def serve(self, requests: AsyncIterator[loans_pb2.OwnerWish]) -> AsyncGenerator[loans_pb2.LoanState, None]:
        """Let one trainer take turns until its stream ends. Raises `InvalidRequest`, `NotReady`, `Superseded`."""
        first = await first_message(requests)
        if first is None:
            raise InvalidRequest("a trainer states its wish first", field="sequence")
        stream = self._claim(from_proto(first, OwnerWish))
        reader = asyncio.create_task(self._read(requests, stream))
        told, told_at = None, 0.0
        try:
            while not reader.done():
                self._order.check(stream.claim)
                state = self._state_of(stream)
                if state != told or time.monotonic() - told_at >= _REPEAT_S:
                    told, told_at = state, time.monotonic()
                    yield to_proto(state, loans_pb2.LoanState)
                await await_news(stream.news, reader, max(0.0, told_at + _REPEAT_S - time.monotonic()))
            reader.result()
        finally:
            reader.cancel()
            self._streams.discard(stream)
            self._order.broke(time.monotonic(), stream.claim)
            self._changed.set()
            log.info("a trainer's stream ended", run_id=stream.wish.run_id, lease=stream.wish.lease)

    def _claim(self, wish: OwnerWish) -> _Stream:
        if wish.protocol_version != LOANS_VERSION:
            raise NotReady(f"this guard speaks version {LOANS_VERSION} of the loans, not {wish.protocol_version}")
        check_id(wish.run_id, field="run_id")
        if not wish.pids:
            raise NotReady("trainers take turns on this device: start the trainer with turns set, without generate")
        trainer = TurnTrainer(
            lease=OwnerLease(wish.run_id, wish.lease, wish.owner), seats=self._seats(wish), priority=wish.priority
        )
        had = self._order.turn
        stream = _Stream(self._order.claim(time.monotonic(), trainer, wants=not wish.lend), wish, trainer)
        if had is not None and self._order.turn is None:
            self._ended(had, "given_back", "")
        self._streams.add(stream)
        self._record.write(self._order.newest())
        self._tell()
        self._changed.set()
        log.info("a trainer takes turns", run_id=wish.run_id, lease=wish.lease, pids=wish.pids)
        return stream

    def _seats(self, wish: OwnerWish) -> tuple[Seat, ...]:
        found: list[BorrowerProcess] = []
        for pid in wish.pids:
            try:
                found += borrower_processes.checked((pid,), seat_path(self._folder, pid))
            except InvalidRequest as error:
                raise InvalidRequest(error.text, field="pids") from None
        return tuple(Seat(one.pid, one.started) for one in found)

    async def _read(self, requests: AsyncIterator[loans_pb2.OwnerWish], stream: _Stream) -> None:
        async for message in requests:
            wish, old = from_proto(message, OwnerWish), stream.wish
            if (wish.run_id, wish.lease, wish.owner, wish.pids) != (old.run_id, old.lease, old.owner, old.pids):
                raise InvalidRequest("a trainer stays the same for all of a stream; open another one", field="lease")
            if wish.sequence < old.sequence:
                raise InvalidRequest(f"must not fall; {old.sequence} was before", field="sequence")
            if wish.sequence > old.sequence:
                stream.asked_at = time.monotonic()
            had, lost = self._order.turn, self._order.lost
            stream.wish = wish
            self._order.wish(time.monotonic(), stream.claim, stream.trainer, wants=not wish.lend)
            if had is not None and self._order.turn is None:
                self._ended(had, "lost" if lost else "given_back", lost)
            if wish.sequence > old.sequence:
                self._review()
                stream.news.set()

    def _state_of(self, stream: _Stream) -> LoanState:
        wish, turn = stream.wish, self._order.turn
        has = not wish.lend and turn is not None and self._order.has(stream.claim) and not self._unwritten
        return LoanState(
            sequence=wish.sequence,
            compute_back=has,
            memory_back=has,
            waits_for="" if has or wish.lend else self._waits_for(),
            repeat_s=_REPEAT_S,
            turn=turn.number if has and turn is not None else 0,
            expires_s=_EXPIRES_S if has else 0.0,
        )

    def _waits_for(self) -> str:
        if self._unwritten:
            return f"the guard's ledger, which cannot be written: {self._unwritten}"
        turn = self._order.turn
        return f"the turn of run {turn.trainer.lease.run_id}" if turn is not None else "its turn"

    async def _run(self) -> None:
        while True:
            self._review()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._changed.wait()
            self._changed.clear()

    def _review(self) -> None:
        """End a turn whose trainer is gone, kill one that has lost its turn, and begin the next turn."""
        now, turn = time.monotonic(), self._order.turn
        spent, self._looked_at = now - self._looked_at, now
        self._held_s += spent if turn is not None else 0.0
        if turn is not None and not any(map(borrower_processes.alive, _processes(turn))):
            reason = self._order.lost or "its processes are gone"
            self._order.gone()
            self._ended(turn, "lost", reason)
            log.warning("a turn is lost", run_id=turn.trainer.lease.run_id, turn=turn.number, reason=reason)
        if not self._closed and not self._unwritten_ends(now):
            self._begin(now)
        if (turn := self._order.turn) is not None and self._order.lost:
            self._kill(turn)
        HELD.set(self._order.turn is not None)
        QUEUE.set(len(self._order.queue(now)))

    def _begin(self, now: float) -> None:
        began = self._order.review(now)
        if began is None:
            return
        try:
            self._ledger.write(now, began, began=True)
        except OSError as error:
            self._unwritten = error.strerror or str(error)
            log.error("no turn begins: the ledger cannot be written", reason=self._unwritten)  # noqa: TRY400
            return
        for stream in self._streams:
            if self._order.has(stream.claim):
                WAIT_SECONDS.observe(max(0.0, now - stream.asked_at))
        log.info("a turn begins", run_id=began.trainer.lease.run_id, turn=began.number)
        self._tell()

    def _unwritten_ends(self, now: float) -> bool:
        """Whether a turn is still kept back because it is not in the ledger."""
        turn = self._order.turn
        if not self._unwritten or turn is None:
            self._unwritten = ""
            return False
        with suppress(OSError):
            self._ledger.write(now, turn, began=True)
            self._unwritten = ""
            self._tell()
        return bool(self._unwritten)

    def _kill(self, turn: Turn) -> None:
        """Kill the trainer once; a process that cannot die yet, such as one in a system call, ends its turn later."""
        if self._killed == turn.number:
            return
        self._killed = turn.number
        sent = borrower_processes.send(_processes(turn), signal.SIGKILL)
        lease = turn.trainer.lease
        log.warning("trainer killed", run_id=lease.run_id, turn=turn.number, reason=self._order.lost, processes=sent)

    def _ended(self, turn: Turn, outcome: str, reason: str) -> None:
        now = time.monotonic()
        TURNS.labels(outcome).inc()
        TURN_SECONDS.observe(max(0.0, now - turn.began))
        self._given += outcome == "given_back"
        self._lost += outcome == "lost"
        if outcome == "lost":
            self._sweep_seats()
        try:
            self._ledger.write(now, turn, began=False, reason=reason)
        except OSError as error:  # the next line of the ledger says so, too: one turn begins where another has ended
            log.warning("the end of a turn is not in the ledger", turn=turn.number, reason=str(error))
        self._tell()

    def _tell(self) -> None:
        for stream in self._streams:
            stream.news.set()

    def _state(self) -> str:
        if self._closed:
            return "closed"
        return "held" if self._order.turn is not None else "free"

    def _sweep_seats(self) -> None:
        """Remove the seats of processes that are gone."""
        for path in self._folder.glob("*.seat"):
            if path.stem.isdigit() and not Path(f"/proc/{path.stem}").exists():
                path.unlink(missing_ok=True)


async def _no_borrower(
    requests: AsyncIterator[grants_pb2.BorrowerMessage],  # noqa: ARG001 - the interface
) -> AsyncGenerator[grants_pb2.Grant, None]:
    grants: tuple[grants_pb2.Grant, ...] = ()
    for grant in grants:
        yield grant
    raise NotReady("trainers take turns on this device, and no worker borrows it; name another guard's folder")


def _processes(turn: Turn) -> list[BorrowerProcess]:
    return [BorrowerProcess(seat.pid, seat.started) for seat in turn.trainer.seats]
